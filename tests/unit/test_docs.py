"""The documentation agrees with the code: settings, metrics, errors, files, commands and code.

Each block of code runs, or says why it does not:

| before a block | meaning |
|---|---|
| `<!-- runs -->` | Python that `tests/doc_runner.py` executes, or a diff, as it is afterwards |
| `<!-- setup` … `-->` | code that a reader already has, or a check; executed with the blocks |
| `<!-- runs in tests/… -->` | the named test takes the block from the page |
| `<!-- not run: … -->` | the reason |

`<!-- files: tests/… -->` names the test that writes all blocks of a page whose first line names a
file, and runs the commands of the page. `tests/doc_commands.py` runs those of other pages.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner
from freezegun import freeze_time
from sqlalchemy import text
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex

from delaytasks import Status
from delaytasks.cli.main import delays, main
from delaytasks.db.schema import Schema
from delaytasks.events import _LOG_LEVELS as LEVELS
from delaytasks.events import Events
from delaytasks.http_api.routes import ROUTES
from delaytasks.model import errors
from delaytasks.model.moves import Move
from delaytasks.model.text import DEFERRALS
from delaytasks.operate import metrics
from delaytasks.settings import Settings
from delaytasks.testing import DelaysTester
from delaytasks.worker.quick_loops import PROCESS_CHECK_S
from delaytasks.worker.sweep import STALE_CHECK_S
from tests.conformance.test_connections import ROUND_TRIPS
from tests.conftest import new_world
from tests.doc_commands import check_command, command_lines, extras, runs_here
from tests.doc_pages import (
    NAMES,
    ROOT,
    RULES,
    SHELLS,
    block_beginning,
    blocks,
    environment,
    files_test,
)
from tests.unit.test_cli import commands
from tests.world import MOVES, World

#: A file of the project in backticks, perhaps with the name of a test.
_FILE = re.compile(r"`([\w./]+/\w+\.py)(?:::(\w*)[^`]*)?`")
#: A module that a decision gives up.
_OTHER_FILES = {("worker/heap.py", "")}
#: The folders with the files that pages name; pages about Django have the files of the example.
_PLACES = ("", "delaytasks", "tests", "examples/django_shop")

#: Variables of the environment that are no settings begin like this.
_OTHER_VARIABLES = ("DELAYTASKS_APP", "DELAYTASKS_BENCH_", "DELAYTASKS_TEST_")


SETTINGS = Settings().effective()


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def cells(text: str) -> list[str]:
    """Return what is in backticks in the first column of the tables."""
    rows = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def metric_names() -> set[str]:
    """Return the names of the metrics, as Prometheus shows them."""
    info = {"timer_is_up": True, "held": 0, "waiting": 0, "chunks": 0, "loops": {}, "events": {}}
    pool: Any = SimpleNamespace(pool=SimpleNamespace(limit=1))
    of: Any = SimpleNamespace(
        events=Events(), info=lambda: info, statistics=None, celery_worker=pool
    )
    worker = metrics.WorkerMetrics(of)
    lists = dict.fromkeys("late sweeps workers alive".split(), ())
    numbers = dict.fromkeys("overdue oldest_overdue_s expired_leases beat_age_s problem".split(), 0)
    empty: Any = SimpleNamespace(rows={}, **lists, **numbers)
    found = chain(metrics.table_metrics(empty), worker.collect())
    names = {f"delaytasks_{name}_up" for name in ("database", "broker", "redis_timer")}
    names.add("delaytasks_scheduled_total")  # a recipe counts these
    return names | {each.name + ("_total" if each.type == "counter" else "") for each in found}


def test_each_metric_and_each_alert_is_explained() -> None:
    text = page("monitor") + page("tables-and-terms")
    assert not [name for name in metric_names() if not re.search(rf"[`\"]{name}[`{{\"]", text)]
    shown = re.findall(r"^\| `(DelayTasks\w+)` \|", text, re.MULTILINE)
    assert shown == re.findall(r"- alert: (\w+)", RULES.read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_settings_files_and_tests_that_a_page_names_exist(name: str) -> None:
    series = {f"{name}_{part}" for name in metric_names() for part in ("bucket", "count")}
    known = {row[0] for row in SETTINGS} | metric_names() | series
    text = (ROOT / name).read_text()
    for found in re.findall(r"\b(?:delaytasks|DELAYTASKS)_[A-Za-z0-9_]+\b", text):
        assert found.startswith(_OTHER_VARIABLES) or found.lower() in known, found
    for file, function in {*_FILE.findall(text)} - _OTHER_FILES:
        found = [path for place in _PLACES if (path := ROOT / place / file).exists()]
        assert found, file
        assert not function or f"def {function}(" in found[0].read_text(), f"{file}::{function}"


@pytest.mark.parametrize("name", NAMES)
def test_each_link_inside_the_project_leads_somewhere(name: str) -> None:
    path = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{name} links {target}"
        anchors = {_anchor(line) for line in found.read_text().splitlines()} if anchor else {""}
        assert anchor in anchors, f"{name} links {target}"


def _anchor(heading: str) -> str | None:
    """Return the anchor that GitHub and MkDocs make for a heading, or None for other lines."""
    if not heading.startswith("#"):
        return None
    return re.sub(r"[^\w\- ]", "", heading.lstrip("#").strip().lower()).replace(" ", "-")


# -- tables generated from the code ---------------------------------------------------------------


def table(columns: str, rows: Iterable[Sequence[object]]) -> str:
    head, *lines = (f"| {' | '.join(map(str, row))} |" for row in (columns.split(), *rows))
    return "\n".join([head, "|---" * len(columns.split()) + "|", *lines])


def settings_table() -> str:
    rows = ((f"`{name}`", value and f"`{value}`", about) for name, value, _, about in SETTINGS)
    return table("setting default meaning", rows)


def moves_table() -> str:
    def sources(move: Move) -> str:
        return ", ".join(status.name for status in Status if status in move.sources) or "–"

    rows = ((f"`{move.name}`", sources(move), move.target.name) for move in MOVES.values())
    return table("move from to", rows)


def round_trips_table() -> str:
    rows = (
        (step, first.database, second.database, first.broker, second.broker)
        for step, (first, second) in ROUND_TRIPS.items()
    )
    return table("step PostgreSQL MariaDB Redis RabbitMQ", rows)


def http_routes_table() -> str:
    return table("operation request", ((r.summary, f"`{r.method} {r.path}`") for r in ROUTES))


#: The options with which several commands select tasks.
FILTERS = """
tag key queue status meta error due created updated_until everything dry_run yes
""".split()
#: The options of a new task, and of the tasks of a recurring schedule.
NEW_TASK = "queue priority retries max_late limit_key meta jitter body_version".split()
#: An option by which a group is known, its options, and what is said of it.
GROUPS = {
    "updated_until": (FILTERS, "With [filters](#filters)."),
    "limit_key": (NEW_TASK, "With [the options of a task](#options-of-a-task)."),
}


def commands_list() -> str:
    """Return each command with its options. Those of many commands are listed once."""
    found = dict(commands(main))
    about = "These options select tasks, which must match all of them."
    parts = [f"### Filters\n\n{about}", _options(found["cancel"], FILTERS)]
    parts += ["### Options of a task", _options(found["schedule"], NEW_TASK)]
    for path, command in found.items():
        names = [str(option.name) for option in command.params]
        groups = [group for option, group in GROUPS.items() if option in names]
        shared = {"json", "actor", *chain(*(options for options, _ in groups))}
        usage = " ".join(command.collect_usage_pieces(click.Context(command))[1:])
        summary = " ".join((command.help or "").partition("\n\n")[0].split())
        parts += [f"### delaytasks {path}", f"`{usage}`: {summary}" if usage else summary]
        parts += [said for _, said in groups]
        parts += [_options(command, [name for name in names if name not in shared])]
    return "\n\n".join(filter(None, parts))


def _options(command: click.Command, names: Sequence[str]) -> str:
    context = click.Context(command)
    options = [each for each in command.params if isinstance(each, click.Option)]
    records = [each.get_help_record(context) for each in options if each.name in names]
    lines = [f"- `{each[0]}`: {each[1]}" for each in records if each is not None]
    return "\n".join(lines).replace("*", "\\*")


GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    "settings": ("docs/settings-and-commands.md", settings_table),
    "commands": ("docs/settings-and-commands.md", commands_list),
    "moves": ("docs/guarantees.md", moves_table),
    "round trips": ("docs/guarantees.md", round_trips_table),
    "http routes": ("docs/callbacks.md", http_routes_table),
}


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- generated: {name} -->\n).*?(?=<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_tables_match_the_code(name: str) -> None:
    page, make = GENERATED[name]
    found = _place(name).search((ROOT / page).read_text())
    assert found is not None, f"{page} has no place for {name}"
    assert found[0].strip() == make().strip(), "out of date; run: ./dev tables"


def write_tables() -> None:
    for name, (page, make) in GENERATED.items():
        before, _, after = _place(name).sub("\0", (ROOT / page).read_text()).partition("\0")
        (ROOT / page).write_text(f"{before}\n{make()}\n\n{after}")


def test_each_event_that_is_logged_is_explained_with_its_level() -> None:
    shown = dict[str, str]()
    table = page("tables-and-terms")
    for names, levels in re.findall(r"^\| (`[a-z_.`, ]+) \| ([A-Z, ]+) \|", table, re.M):
        shown.update(zip(re.findall(r"`([^`]+)`", names), levels.split(", "), strict=True))
    source = "".join(path.read_text() for path in (ROOT / "delaytasks").rglob("*.py"))
    emitted = set(re.findall(r'emit\(\s*"([a-z_.]+)"', source))
    emitted |= {f"task.{code}" for code in DEFERRALS}
    levels = {name: logging.getLevelName(level) for name, level in LEVELS.items()}
    assert shown == {name: level for name, level in levels.items() if name in emitted}


def test_each_error_is_explained_and_the_tree_has_those_below_the_first_one() -> None:
    text = page("fix-a-problem") + page("reference")
    first, *lines = block_beginning("docs/reference.md", "DelayTaskError").text.splitlines()
    root = getattr(errors, first)
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, root)]
    names = [kind.__name__ for kind in kinds]
    assert not [name for name in names if not re.search(rf"`{name}`|^\W*{name}\b", text, re.M)]
    branch = re.compile(r"[├└]── (\w+)(?: \(an? (\w+)\))? +\S.*")
    assert {match[1]: match[2] for line in lines if (match := branch.fullmatch(line))} == {
        kind.__name__: next((base.__name__ for base in kind.__bases__ if base is not root), None)
        for kind in kinds
        if root in kind.__bases__
    }


def test_the_extras_and_columns_in_the_docs_are_those_of_the_package() -> None:
    shown = re.findall(r"^\| `delaytasks\[(\w+)\]`", page("first-task"), re.MULTILINE)
    assert {*shown} == extras()
    columns = cells(page("tables-and-terms").partition("## The columns")[2].partition("\n## ")[0])
    assert sorted(columns) == sorted(column.name for column in Schema().tasks.columns)


def test_the_documented_values_to_watch_exist(world: World) -> None:
    shown = cells(page("monitor").partition("## What to watch")[2].partition("\n## ")[0])
    world.serve("w1", "default")
    app = SimpleNamespace(app=world.runtime.celery, no_color=True)
    found = json.loads(CliRunner().invoke(delays, ["status", "--json"], obj=app).stdout)
    assert shown, "the table is there"
    for path in shown:
        value: Any = found
        for name in path.split("."):
            value = value[name.removesuffix("[]")]
            value = value[0] if name.endswith("[]") else value


# -- SQL ------------------------------------------------------------------------------------------


def test_the_statements_in_the_docs_make_and_cancel_a_task(database_url: str) -> None:
    titles = {"postgresql": "-- PostgreSQL", "mysql": "-- MySQL, MariaDB", "sqlite": "-- SQLite"}
    shown = [b.text for b in blocks(ROOT / "docs/callbacks.md") if b.language == "sql"]

    def execute(beginning: str, id: int = 42) -> None:
        [sql] = [each for each in shown if each.startswith(beginning)]
        # SQLAlchemy reads an unescaped colon as the start of a parameter.
        sql = sql.replace("yb_", "docs_yb_").replace("42", str(id)).replace(":", "\\:")
        with world.begin() as connection:
            connection.execute(text(sql))

    with new_world(World, database_url, table_prefix="docs_") as world:
        execute(titles[world.kind])
        [task] = world.delays.find()
        assert (task.tag, task.body, task.delay_s) == ("order.close", {"order": 7}, 1800)
        assert task.status is Status.NOT_COMPLETE
        left = task.expected_time - world.now()
        assert timedelta(seconds=1790) < left <= timedelta(seconds=1800)
        execute("UPDATE", task.id)
        cancelled = world.read(task)
        assert (cancelled.status, cancelled.version) == (Status.CANCELLED, 1)


def test_the_recovery_times_of_faults_follow_from_the_default_settings() -> None:
    settings = Settings()
    table = page("guarantees").partition("## What each fault costs")[2]
    shown = re.findall(r"^\| (\w+) \| (\S+) s \|", table, re.MULTILINE)
    assert {name: float(seconds) for name, seconds in shown} == {
        "G": settings.grace_s,
        "S": settings.sweep_s,
        "N": settings.self_sweep_s + STALE_CHECK_S,
        "L": settings.lease_s,
        "D": settings.lost_s,
        "R1": settings.grace_s + settings.sweep_s,
        "R2": settings.lease_s + settings.sweep_s,
        "R3": settings.lost_s + settings.sweep_s,
    }
    assert (settings.silent_s, PROCESS_CHECK_S) == (3 * settings.sweep_s, 1)
    assert re.search(r"^\| a pool process dies .* \| about a second \|", table, re.MULTILINE)
    assert re.search(r"^\| a worker is killed, .* After 3 S it counts as dead", table, re.MULTILINE)


def test_the_indexes_to_create_before_a_migration_are_those_of_the_schema() -> None:
    indexes = map(CreateIndex, Schema().tasks.indexes)
    made = {str(index.compile(dialect=postgresql.dialect())) for index in indexes}
    block = block_beginning("docs/deployment.md", "CREATE INDEX CONCURRENTLY")
    text = re.sub(r"\s+", " ", block.text.replace(" CONCURRENTLY", ""))
    first, second, third = text.strip(" ;").split("; ")
    assert {first, second, third} <= made


def test_a_failed_assertion_has_the_text_in_the_documentation(world: World) -> None:
    documented = block_beginning("docs/testing.md", "AssertionError: ").text
    with freeze_time("2027-01-01"), DelaysTester(world.delays) as tester:
        world.delays.schedule_delay("order.close", {"order": 7}, "30m", key="7")
        with pytest.raises(AssertionError) as raised:
            tester.assert_scheduled("order.close", key="7", body={"order": 8}, within="20m")
    assert f"AssertionError: {raised.value}\n" == documented


# -- blocks of code -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_each_block_runs_or_states_why_it_does_not(name: str) -> None:
    page = ROOT / name
    silent = [
        f"{name}:{block.line}"
        for block in blocks(page)
        if not block.runs
        and block.language not in SHELLS
        and block.test is None
        and not block.before.startswith("<!-- not run: ")
        and not (block.file and files_test(page))
    ]
    assert silent == []
    for test in ({block.test for block in blocks(page)} | {files_test(page)}) - {None}:
        assert page.name in (ROOT / str(test)).read_text(), f"{test} does not read the page"


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if any(b.runs for b in blocks(ROOT / n))])
def test_the_blocks_of_a_page_that_are_marked_to_run_succeed(name: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.doc_runner", str(ROOT / name)]
    env = environment(tmp_path)
    done = subprocess.run(words, cwd=tmp_path, env=env, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in NAMES if any(runs_here(ROOT / n, each) for each in blocks(ROOT / n))]
)
def test_the_commands_of_a_page_run(name: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.doc_commands", str(ROOT / name)]
    env = {**environment(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=tmp_path, env=env, timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_each_command_shown_exists_with_its_options_and_values(name: str) -> None:
    for block in blocks(ROOT / name):
        if block.language in SHELLS and not block.before.startswith("<!-- not run: "):
            for line in command_lines(block):
                check_command(shlex.split(line.partition(" > ")[0], comments=True), line)


if __name__ == "__main__":
    write_tables()
