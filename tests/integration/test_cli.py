"""The command line on a project with a Celery app of its own and SQLite; no broker but kombu's in-memory one."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import insert, update

from delaytasks import DelayTask, DelayTasks, Status
from delaytasks.cli.main import main
from delaytasks.engine import producer
from delaytasks.store.types import db_now_plus
from tests.services import free_port

ROOT = Path(__file__).parents[2]
HOSTILE = "\x1b[31mred\x1b[0m [red]markup[/red]\r\nforged line"
FAR = "2999-01-01T00:00:00Z"

MODULE = """
import os, signal, time
from celery import Celery
from delaytasks import DelayTasks

app = Celery("shop", set_as_current=False)
delays = DelayTasks(app)

@delays.processor("ok")
def ok(body): pass

@delays.processor("mail", queue="letters")
def mail(body): pass

@delays.processor("bad")
def bad(body): raise ValueError({hostile!r})

@delays.processor("noisy")
def noisy(body): print("noise")

@delays.processor("stop")
def stop(body, task):
    if task.attempts == 1:
        for _ in range(body):
            os.kill(os.getpid(), signal.SIGINT)

@delays.processor("long")
def long(body, task):
    first = lease = delays.get(task.id).lease_until
    ends = time.monotonic() + 10
    while lease == first:
        assert time.monotonic() < ends, "nobody renewed the lease"
        lease = delays.get(task.id).lease_until
"""


class Project:
    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *arguments: str, typed: str | bytes | None = None) -> Result:
        result = CliRunner().invoke(main, ["-A", self.name, *arguments], input=typed)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result

    def json(self, *arguments: str, exit_code: int = 0, typed: str | bytes | None = None) -> Any:
        """What the command says on stdout; nothing else is there."""
        result = self(*arguments, "--json", typed=typed)
        assert result.exit_code == exit_code, result.output
        return json.loads(result.stdout)

    def error(self, *arguments: str, exit_code: int, typed: str | None = None) -> Any:
        """What the command says on stderr; nothing else is there."""
        result = self(*arguments, "--json", typed=typed)
        assert result.exit_code == exit_code, result.output
        found = json.loads(result.stderr)
        assert set(found) == {"error", "type"}
        # People are told the same.
        plain = self(*arguments, typed=typed)
        assert plain.exit_code == exit_code
        assert "Error: " in plain.stderr
        assert "Traceback" not in plain.output
        return found

    @property
    def delays(self) -> DelayTasks:
        made: DelayTasks = import_module(self.name).delays
        return made

    def schedule(self, tag: str = "ok", delay: float = 0, body: Any = None, **options: Any) -> DelayTask:
        return self.delays.schedule_delay(tag, body, delay, **options)

    def status(self, task: DelayTask) -> Status:
        return self.delays.get(task.id).status


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project without tables."""
    name = "shop_of_cli_tests"
    (tmp_path / f"{name}.py").write_text(MODULE.format(hostile=HOSTILE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("DELAYTASKS_DATABASE_URL", f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    monkeypatch.setenv("CELERY_BROKER_URL", "memory://")
    yield Project(name)
    module = sys.modules.pop(name, None)
    if module is not None:
        module.delays.close()


@pytest.fixture
def shop(bare: Project) -> Project:
    store = bare.delays.store
    with store.database.begin() as connection:
        store.schema.metadata.create_all(connection)
    return bare


# -- schedule -------------------------------------------------------------------------------------


def test_schedule_answers_with_the_task(shop: Project) -> None:
    options = ["--key", "k", "--priority", "3", "--queue", "q", "--id", "42"]
    task = shop.json("schedule", "ok", '{"n": 9007199254740993}', "--delay", "1h30m", *options)
    assert task["id"] == "42"
    assert task["status"] == "NOT_COMPLETE"
    assert (task["tag"], task["key"], task["queue"], task["priority"]) == ("ok", "k", "q", 3)
    assert task["body"] == {"n": 9007199254740993}
    assert task["delay_s"] == 5400
    stored = shop.delays.get(42)
    assert stored.body == {"n": 9007199254740993}
    assert stored.expected_time.isoformat() == task["expected_time"]


def test_schedule_takes_an_instant(shop: Project) -> None:
    task = shop.json("schedule", "ok", "--at", "2030-01-01T02:00:00+02:00")
    assert task["expected_time"] == "2030-01-01T00:00:00+00:00"


def test_schedule_tells_people_what_it_did(shop: Project) -> None:
    said = shop("schedule", "ok", "--delay", "30m", "--id", "42")
    assert said.exit_code == 0
    assert re.fullmatch(r"scheduled task 42 \(ok\): due \S+Z, in (30m|29m59s)\n", said.stdout)


def test_schedule_uses_the_queue_of_the_processor(shop: Project) -> None:
    assert shop.json("schedule", "mail", "--delay", "1h")["queue"] == "letters"


def test_a_body_comes_from_a_file_or_from_stdin(shop: Project, tmp_path: Path) -> None:
    (tmp_path / "body.json").write_text('["é"]', encoding="utf-8")
    assert shop.json("schedule", "ok", "@body.json", "--delay", "1h")["body"] == ["é"]
    assert shop.json("schedule", "ok", "-", "--delay", "1h", typed='{"a": 1}')["body"] == {"a": 1}
    assert shop.json("schedule", "ok", "--delay", "1h")["body"] is None


def test_a_key_that_is_taken_is_refused_kept_or_replaced_as_one_says(shop: Project) -> None:
    first = shop.json("schedule", "ok", "1", "--delay", "1h", "--key", "k")
    again = ["schedule", "ok", "2", "--delay", "2h", "--key", "k"]
    assert shop.error(*again, exit_code=1)["type"] == "DuplicateTaskError"
    kept = shop.json(*again, "--on-conflict", "keep")
    assert (kept["id"], kept["body"]) == (first["id"], 1)
    replaced = shop.json(*again, "--on-conflict", "replace")
    assert (replaced["id"], replaced["body"]) == (first["id"], 2)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["ok", "--delay", "soon"], "InvalidDelayError"),
        (["ok", "--delay", "-5"], "InvalidDelayError"),
        (["ok", "--delay", "9999d"], "InvalidDelayError"),
        (["ok", "--at", "2030-01-01T00:00"], "NaiveDatetimeError"),
        (["ok", "--at", "tomorrow"], "InvalidScheduleError"),
        (["ok", "{a}", "--delay", "1"], "BodyNotJSONError"),
        (["ok", "NaN", "--delay", "1"], "BodyNotJSONError"),
        (["ok", "[" * 100_000, "--delay", "1"], "BodyNotJSONError"),
        (["ok", r'"\u0000"', "--delay", "1"], "BodyNotStorableError"),
        (["ok", json.dumps("x" * 300_000), "--delay", "1"], "BodyTooLargeError"),
        (["ok", "@nowhere.json", "--delay", "1"], "BadParameter"),
        ([" ", "--delay", "1"], "InvalidTagError"),
        (["a\nb", "--delay", "1"], "InvalidTagError"),
        (["ok", "--delay", "1", "--id", "1 OR 1=1"], "InvalidIdError"),
        (["ok", "--delay", "1", "--priority", "10"], "InvalidPriorityError"),
        (["ok", "--delay", "1", "--priority", "x"], "BadParameter"),
        (["ok", "--delay", "1", "--key", ""], "InvalidKeyError"),
        (["ok", "--delay", "1", "--queue", " "], "InvalidQueueError"),
        (["ok", "--delay", "1", "--on-conflict", "x"], "BadParameter"),
        (["ok", "--delay", "1", "--at", FAR], "UsageError"),
        (["ok"], "UsageError"),
        ([], "UsageError"),
        (["ok", "--delya", "1"], "NoSuchOption"),
        (["ok", "--many", "-"], "UsageError"),
        (["--many", "nowhere.jsonl"], "BadParameter"),
    ],
)
def test_what_can_not_be_scheduled_ends_with_2_and_leaves_nothing(
    shop: Project, arguments: list[str], error: str
) -> None:
    assert shop.error("schedule", *arguments, exit_code=2)["type"] == error
    assert len(shop.delays.find()) == 0


def test_a_broker_that_is_away_is_said_and_does_no_harm(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    said = shop("schedule", "ok", "--delay", "1")
    assert said.exit_code == 0
    assert "a sweep will send it" in said.stderr
    assert len(shop.delays.find()) == 1


# -- schedule --many ------------------------------------------------------------------------------


def lines(*tasks: Any) -> str:
    return "".join(json.dumps(task) + "\n" for task in tasks)


def test_many_tasks_come_from_a_file(shop: Project, tmp_path: Path) -> None:
    (tmp_path / "many.jsonl").write_text(
        lines(
            {"tag": "ok", "body": {"n": 1}, "delay": "1h"},
            {"tag": "mail", "at": "2030-01-01T00:00:00Z", "key": "k"},
            {"tag": "ok", "delay": 90, "id": "42", "priority": 5, "queue": "q"},
        )
        + "\n"
    )
    assert shop.json("schedule", "--many", "many.jsonl") == {"scheduled": 3}
    found = {task.tag + (task.key or ""): task for task in shop.delays.find() if task.id != 42}
    assert found["ok"].body == {"n": 1}
    assert found["mailk"].queue == "letters"
    assert found["mailk"].expected_time == datetime(2030, 1, 1, tzinfo=timezone.utc)
    assert (shop.delays.get(42).priority, shop.delays.get(42).queue) == (5, "q")


def test_many_tasks_come_from_stdin_and_share_what_the_command_says(shop: Project) -> None:
    text = lines({"tag": "ok", "delay": 90}, {"tag": "ok", "delay": 90, "queue": "own", "priority": 1})
    said = shop("schedule", "--many", "-", "--queue", "all", "--priority", "7", typed=text)
    assert (said.exit_code, said.stdout, said.stderr) == (0, "scheduled 2 tasks\n", "")
    assert {(task.queue, task.priority) for task in shop.delays.find()} == {("all", 7), ("own", 1)}


def test_many_tasks_with_keys_may_be_kept(shop: Project) -> None:
    text = lines(*({"tag": "ok", "delay": 90, "key": key} for key in "aba"))
    assert shop.json("schedule", "--many", "-", "--on-conflict", "keep", typed=text) == {"scheduled": 2}


@pytest.mark.parametrize(
    ("line", "error", "says"),
    [
        ("{", "BodyNotJSONError", "line 2: "),
        ("[1]", "InvalidScheduleError", "line 2: "),
        ('{"delay": 1}', "InvalidScheduleError", "line 2: "),
        ('{"tag": "ok", "dely": 1}', "InvalidScheduleError", "did you mean 'delay'"),
        ('{"tag": "ok", "delay": "soon"}', "InvalidDelayError", "line 2: "),
        ('{"tag": "ok", "delay": -1}', "InvalidDelayError", "line 2: "),
        ('{"tag": "ok", "delay": true}', "InvalidDelayError", "line 2: "),
        ('{"tag": "ok"}', "InvalidScheduleError", "line 2: "),
        ('{"tag": "ok", "at": 5}', "InvalidScheduleError", "line 2: "),
        ('{"tag": "ok", "at": "2030-01-01T00:00"}', "NaiveDatetimeError", "line 2: "),
        ('{"tag": "ok", "delay": 1, "body": NaN}', "BodyNotJSONError", "line 2: "),
        ('{"tag": "", "delay": 1}', "InvalidTagError", "line 2: "),
        ('{"tag": "ok", "delay": 1, "id": 0}', "InvalidIdError", "line 2: "),
    ],
)
def test_a_wrong_line_is_named_and_nothing_of_its_lot_is_written(
    shop: Project, line: str, error: str, says: str
) -> None:
    text = lines({"tag": "ok", "delay": 90}) + line + "\n" + lines({"tag": "ok", "delay": 90})
    found = shop.error("schedule", "--many", "-", exit_code=2, typed=text)
    assert found["type"] == error
    assert says in found["error"]
    assert found["error"].endswith("; nothing was scheduled")
    assert len(shop.delays.find()) == 0


def test_a_line_that_is_not_utf8_is_named(shop: Project) -> None:
    said = shop("schedule", "--many", "-", "--json", typed=b'{"tag": "\xff"}\n')
    assert said.exit_code == 2
    assert "line 1: the line is not UTF-8" in json.loads(said.stderr)["error"]


def test_an_error_in_a_later_lot_says_what_is_done(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer, "BULK", 2)
    text = lines(*[{"tag": "ok", "delay": 90}] * 5, {"tag": "ok", "delay": -1})
    said = shop("schedule", "--many", "-", "--json", typed=text)
    assert said.exit_code == 2
    message = json.loads(said.stderr)["error"]
    assert message.startswith("line 6: a delay is finite and not negative")
    assert message.endswith("; 4 tasks scheduled, those before line 5")
    assert len(shop.delays.find()) == 4


def test_a_conflict_among_many_says_what_may_be_done(shop: Project) -> None:
    text = lines(*[{"tag": "ok", "delay": 90, "key": "k"}] * 2)
    said = shop("schedule", "--many", "-", "--json", typed=text)
    assert said.exit_code == 1
    found = json.loads(said.stderr)
    assert found["type"] == "DuplicateTaskError"
    assert "perhaps some of lines 1 to 2" in found["error"]


# -- list and show --------------------------------------------------------------------------------


def test_list_finds_by_tag_status_key_and_time(shop: Project) -> None:
    task = shop.schedule("mail", 3600, key="k")
    shop.schedule("ok", 60)
    shop.delays.cancel(shop.schedule("mail", 7200))
    at = task.expected_time.isoformat()

    def ids(*options: str) -> list[str]:
        return [found["id"] for found in shop.json("list", *options)["tasks"]]

    assert len(ids()) == 3
    assert ids("--tag", "mail", "--status", "not_complete") == [str(task.id)]
    assert ids("--tag", "mail", "--key", "k") == [str(task.id)]
    assert ids("--since", at, "--until", (task.expected_time + timedelta(seconds=1)).isoformat()) == [str(task.id)]


def test_list_says_how_to_go_on_and_that_works(shop: Project) -> None:
    ids = [str(shop.schedule("mail", 60 + number, key=f"a b{number}").id) for number in range(5)]
    seen: list[str] = []
    arguments = ["list", "--tag", "mail", "--since", "2020-01-01T00:00:00Z", "--limit", "2"]
    for _ in range(3):
        said = shop(*arguments)
        seen += [line.split()[0] for line in said.stdout.splitlines()[1:]]
        more = re.search(r"^More: delaytasks -A (\S+) (list .*)$", said.stderr, re.MULTILINE)
        if more is None:
            break
        assert more[1] == shop.name
        arguments = shlex.split(more[2])
    assert seen == ids


def test_the_cursor_is_in_the_json_document(shop: Project) -> None:
    ids = [str(shop.schedule("ok", 60 + number).id) for number in range(3)]
    page = shop.json("list", "--limit", "2")
    rest = shop.json("list", "--limit", "2", "--cursor", page["cursor"])
    assert [task["id"] for task in page["tasks"] + rest["tasks"]] == ids
    assert rest["cursor"] is None


@pytest.mark.parametrize(
    "options",
    [["--limit", "0"], ["--limit", "-1"], ["--limit", "1000000000"], ["--cursor", "x"], ["--since", "now"]],
)
def test_a_query_that_makes_no_sense_ends_with_2(shop: Project, options: list[str]) -> None:
    assert shop.error("list", *options, exit_code=2)["type"] in ("InvalidQueryError", "InvalidScheduleError")


def test_show_has_all_fields_and_what_may_happen_next(shop: Project) -> None:
    task = shop.schedule("ok", 3600, {"a": [1]}, key="k")
    shown = shop.json("show", str(task.id))
    assert {**task.as_json(), "moves": shown["moves"], "update_time": shown["update_time"]} == shown
    assert shown["moves"] == ["claim", "cancel", "reschedule", "replace"]
    said = shop("show", "--tag", "ok", "--key", "k").stdout
    assert '  {\n    "a": [\n      1\n    ]\n  }\n' in said
    assert all(re.search(rf"^{name} ", said, re.MULTILINE) for name in shown if name not in ("body", "error"))


def test_strangers_text_can_do_no_harm(shop: Project) -> None:
    """A row from another program, with all that a terminal could trip over."""
    store = shop.delays.store
    hostile = {"id": 7, "tag": HOSTILE, "message_body": f"not json {HOSTILE}", "error_stack": HOSTILE, "status": 2}
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.tasks).values(**hostile, task_key=HOSTILE, worker=HOSTILE))
    for arguments in (["list"], ["show", "7"], ["reschedule", "7", "--delay", "1"], ["retry", "7"], ["stats"]):
        said = shop(*arguments).output
        assert all(line.isprintable() for line in said.split("\n")), said
        assert not re.search(r"^forged line", said, re.MULTILINE)
    assert len(shop("list").stdout.splitlines()) == 2
    assert "[red]markup[/red]" in shop("list").stdout
    shown = shop("show", "7", "--json").stdout
    assert shown.replace("\n", "").isascii()
    assert "\x1b" not in shown
    assert json.loads(shown)["tag"] == HOSTILE


def test_an_error_s_stack_is_shown_line_by_line(shop: Project) -> None:
    task = shop.schedule("bad")
    shop("drain")
    said = shop("show", str(task.id)).stdout
    assert "\nerror\n  Traceback (most recent call last):\n" in said
    assert r"  ValueError: \x1b[31mred\x1b[0m [red]markup[/red]\r" in said
    assert "\x1b" not in said


# -- cancel, reschedule, retry --------------------------------------------------------------------


def test_cancel_answers_for_each_task(shop: Project) -> None:
    first, second = shop.schedule(delay=60), shop.schedule(delay=60)
    shop.delays.cancel(second)
    answer = shop.json("cancel", str(first.id), "5", str(second.id), exit_code=1)
    assert answer == {
        "cancelled": [str(first.id)],
        "unchanged": [str(second.id)],
        "failed": [{"id": "5", "error": "there is no task 5", "type": "TaskNotFoundError"}],
    }
    assert shop.status(first) is Status.CANCELLED
    assert shop.error("cancel", "5", exit_code=1)["type"] == "TaskNotFoundError"


def test_people_are_told_every_failure_of_a_cancel(shop: Project) -> None:
    task = shop.schedule(delay=60)
    said = shop("cancel", "5", str(task.id), "6")
    assert said.exit_code == 1
    assert said.stdout == f"cancelled task {task.id}\n"
    assert said.stderr == "Error: there is no task 5\nError: there is no task 6\n"


def test_cancel_by_tag_and_key(shop: Project) -> None:
    task = shop.schedule(delay=60, key="k")
    assert shop.json("cancel", "--tag", "ok", "--key", "k")["cancelled"] == [str(task.id)]
    assert shop.error("cancel", "--tag", "ok", "--key", "k", exit_code=1)["type"] == "TaskNotFoundError"


@pytest.mark.parametrize("arguments", [[], ["--tag", "ok"], ["--key", "k"], ["1", "--tag", "ok", "--key", "k"], ["x"]])
def test_a_cancel_that_names_no_task_ends_with_2(shop: Project, arguments: list[str]) -> None:
    shop.error("cancel", *arguments, exit_code=2)


def test_an_id_that_can_not_be_one_stops_the_whole_command(shop: Project) -> None:
    task = shop.schedule(delay=60)
    assert shop.error("cancel", str(task.id), "x", exit_code=2)["type"] == "InvalidIdError"
    assert shop.status(task) is Status.NOT_COMPLETE


def test_a_task_that_runs_or_is_done_can_not_be_cancelled(shop: Project) -> None:
    task = shop.schedule()
    shop.delays.store.claims("w", None).claim_due("default", [0], 1)
    assert shop.error("cancel", str(task.id), exit_code=1)["type"] == "CancelTooLateError"
    done = shop.schedule()
    shop("drain")
    assert shop.error("cancel", str(done.id), exit_code=1)["type"] == "InvalidStatusError"


def test_reschedule_moves_a_task_unless_somebody_else_did(shop: Project) -> None:
    task = shop.schedule(delay=60)
    moved = shop.json("reschedule", str(task.id), "--at", "2030-01-01T00:00:00Z", "--version", "0")
    assert moved["expected_time"] == "2030-01-01T00:00:00+00:00"
    assert moved["version"] == 1
    stale = shop.error("reschedule", str(task.id), "--delay", "2h", "--version", "0", exit_code=1)
    assert stale["type"] == "StaleVersionError"
    assert "rescheduled task" in shop("reschedule", str(task.id), "--delay", "2h").stdout
    assert shop.error("reschedule", str(task.id), exit_code=2)["type"] == "UsageError"
    assert shop.error("reschedule", "--delay", "1", exit_code=2)["type"] == "InvalidScheduleError"


def test_retry_runs_failed_and_cancelled_tasks_again(shop: Project) -> None:
    failed, cancelled, waiting = shop.schedule("bad"), shop.schedule(delay=60), shop.schedule(delay=60)
    shop("drain")
    shop.delays.cancel(cancelled)
    ids = [str(task.id) for task in (failed, cancelled, waiting)]
    answer = shop.json("retry", *ids, "--delay", "1h", exit_code=1)
    assert [(task["id"], task["status"]) for task in answer["retried"]] == [(id, "NOT_COMPLETE") for id in ids[:2]]
    assert [(one["id"], one["type"]) for one in answer["failed"]] == [(ids[2], "InvalidStatusError")]
    assert shop.delays.get(failed.id).expected_time > shop.delays.clock.now() + timedelta(minutes=59)
    assert shop.error("retry", exit_code=2)["type"] == "MissingParameter"


# -- drain ----------------------------------------------------------------------------------------


def test_drain_runs_what_is_overdue_and_leaves_the_rest(shop: Project) -> None:
    overdue = [shop.schedule("ok", priority=number % 3) for number in range(30)] + [shop.schedule("mail")]
    failed, unknown, later = shop.schedule("bad"), shop.schedule("nobody's"), shop.schedule(delay=60)
    answer = shop.json("drain")
    assert answer.pop("seconds") >= 0
    assert answer == {
        "ran": 32,
        "succeeded": 31,
        "failed": 1,
        "without_processor": 1,
        "unknown_tags": ["nobody's"],
        "lapsed": 0,
        "is_stopped": False,
    }
    assert {shop.status(task) for task in overdue} == {Status.DONE}
    assert shop.status(failed) is Status.FAILED
    assert shop.status(unknown) is Status.NOT_COMPLETE
    assert shop.status(later) is Status.NOT_COMPLETE


def test_drain_tells_people_what_it_ran(shop: Project) -> None:
    shop.schedule("bad")
    shop.schedule("nobody's")
    said = shop("drain").stdout.splitlines()
    assert re.fullmatch(r"ran 1 task in \S+: 0 DONE, 1 FAILED", said[0])
    assert said[1] == "1 task without processor, tried again later: nobody's"


def test_drain_needs_no_broker(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [shop.schedule("ok") for _ in range(5)]
    monkeypatch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    assert shop.json("drain")["succeeded"] == 5
    assert {shop.status(task) for task in tasks} == {Status.DONE}


def test_drain_takes_only_the_queues_and_the_number_that_it_is_told(shop: Project) -> None:
    for _ in range(3):
        shop.schedule("ok")
        shop.schedule("mail")
    assert shop.json("drain", "--queue", "letters")["ran"] == 3
    assert {task.tag for task in shop.delays.find(status="DONE")} == {"mail"}
    assert shop.json("drain", "--limit", "2")["ran"] == 2
    assert len(shop.delays.find(status="NOT_COMPLETE")) == 1
    assert shop.error("drain", "--limit", "0", exit_code=2)["type"] == "BadParameter"


def test_drain_recovers_what_a_dead_worker_held(shop: Project) -> None:
    task = shop.schedule()
    store = shop.delays.store
    store.claims("dead", None).claim_due("default", [0], 1)
    with store.database.begin() as connection:
        connection.execute(update(store.schema.tasks).values(lease_until=db_now_plus(-1)))
    answer = shop.json("drain")
    assert (answer["lapsed"], answer["succeeded"]) == (1, 1)
    assert shop.status(task) is Status.DONE


def test_drain_renews_the_lease_of_what_runs_long(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYTASKS_LEASE_S", "0.9")
    monkeypatch.delitem(sys.modules, shop.name)
    shop.schedule("long")
    assert shop.json("drain")["succeeded"] == 1


def test_what_processors_print_does_not_spoil_the_json_document(shop: Project) -> None:
    shop.schedule("noisy")
    assert shop.json("drain")["succeeded"] == 1


def test_ctrl_c_stops_a_drain_after_the_current_chunk(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYTASKS_CHUNK_MAX", "10")
    tasks = [shop.schedule("stop", body=1)] + [shop.schedule("ok") for _ in range(30)]
    answer = shop.json("drain", exit_code=1)
    assert answer["is_stopped"]
    assert 1 <= answer["ran"] <= 10
    assert shop.status(tasks[0]) is Status.DONE
    assert shop.status(tasks[-1]) is Status.NOT_COMPLETE
    assert not shop.delays.find(status="RUNNING").tasks
    assert shop.json("drain")["ran"] == 31 - answer["ran"]


def test_a_second_ctrl_c_gives_up_the_task_that_runs(shop: Project) -> None:
    tasks = [shop.schedule("stop", body=2)] + [shop.schedule("ok") for _ in range(3)]
    said = shop("drain")
    assert said.exit_code == 1
    assert "once more to stop at once" in said.stderr
    assert "stopped; there may be more" in said.stdout
    given_up = shop.delays.get(tasks[0].id)
    assert (given_up.status, given_up.lapses, given_up.error) == (Status.NOT_COMPLETE, 1, None)
    assert {shop.status(task) for task in tasks} == {Status.NOT_COMPLETE}
    assert shop.json("drain")["succeeded"] == 4


# -- stats and config -----------------------------------------------------------------------------


def test_stats_sees_tasks_workers_sweeps_and_the_broker(shop: Project) -> None:
    store = shop.delays.store
    shop.schedule("ok", 60)
    late = shop.schedule("ok")
    shop.delays.cancel(shop.schedule("ok", 60))
    shop("db", "upgrade")
    with store.database.begin() as connection:
        connection.execute(
            update(store.schema.tasks).where(store.schema.tasks.c.id == late.id).values(expected_time=db_now_plus(-90))
        )
    for name in ("fresh", "silent"):
        store.workers.seen(name, ["default", "letters"], "prefork", 2, 1500)
    with store.database.begin() as connection:
        workers = store.schema.workers
        connection.execute(update(workers).where(workers.c.name == "silent").values(seen_at=db_now_plus(-60)))
    before = shop.json("stats")
    assert before["sweeps"] == [{"house": 0, "age_s": None, "is_late": True, "armed_until": None}]
    store.sweeps.begin_sweep(0, 1, 1)
    found = shop.json("stats")
    assert found["counts"] == {
        "NOT_COMPLETE": 2, "DONE": 0, "FAILED": 0, "RUNNING": 0, "CANCELLED": 1, "HELD": 0,
    }  # fmt: skip
    assert found["overdue"]["count"] == 1
    assert 89 < found["overdue"]["late_s"] < 120
    assert [(w["name"], w["is_alive"], w["queues"]) for w in found["workers"]] == [
        ("fresh", True, ["default", "letters"]),
        ("silent", False, ["default", "letters"]),
    ]
    assert found["workers"][0]["clock_offset_s"] == 0.0015
    assert found["sweeps"][0]["age_s"] < 30
    assert not found["sweeps"][0]["is_late"]
    assert found["broker"] == {"url": "memory://", "is_up": True, "error": None}
    assert found["database"]["revision"] == found["database"]["head"]
    assert set(found["versions"]) == {"delaytasks", "celery", "sqlalchemy", "python"}
    said = shop("stats").stdout
    assert re.search(r"^overdue +1, the oldest since \S+Z, 1m3\ds ago$", said, re.MULTILINE)
    assert re.search(r"^fresh .* default, letters +\+1\.5ms$", said, re.MULTILINE)


def test_stats_counts_runs_whose_lease_is_over(shop: Project) -> None:
    store = shop.delays.store
    shop.schedule()
    store.claims("dead", None).claim_due("default", [0], 1)
    assert shop.json("stats")["lapsed"] == 0
    with store.database.begin() as connection:
        connection.execute(update(store.schema.tasks).values(lease_until=db_now_plus(-1)))
    assert shop.json("stats")["lapsed"] == 1


def test_stats_says_that_the_broker_is_away(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", f"redis://:canary@127.0.0.1:{free_port()}/0")
    found = shop("stats", "--json")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["broker"]["is_up"] is False
    assert "canary" not in found.output
    assert "canary" not in shop("stats").output


def test_config_prints_every_setting_with_its_origin(bare: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYTASKS_LEASE_S", "33")
    found = bare.json("config")
    settings = {setting["name"]: setting for setting in found["settings"]}
    assert settings["delaytasks_lease_s"]["value"] == "33.0"
    assert settings["delaytasks_lease_s"]["origin"] == "environment"
    assert settings["delaytasks_houses"]["origin"] == "default"
    assert found["app"] == {"value": "shop", "origin": "command line"}
    assert found["broker"] == {"value": "memory://", "origin": "environment"}
    assert re.search(r"^delaytasks_lease_s +33\.0 +environment ", bare("config").stdout, re.MULTILINE)


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_config_masks_passwords(bare: Project, monkeypatch: pytest.MonkeyPatch, option: list[str]) -> None:
    monkeypatch.setenv("DELAYTASKS_DATABASE_URL", "postgresql://me:canary@db.example/shop?sslpassword=canary")
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://me:canary@one.example//;amqp://me:canary@two.example//")
    said = bare("config", *option)
    assert said.exit_code == 0
    assert "db.example" in said.stdout
    assert "two.example" in said.stdout
    assert "canary" not in said.output


# -- db -------------------------------------------------------------------------------------------


def test_db_makes_the_tables_and_takes_them_back(bare: Project) -> None:
    empty = bare.json("db", "current", "--check", exit_code=1)
    assert (empty["revision"], empty["is_current"]) == (None, False)
    assert bare.error("list", exit_code=1)["type"] == "StoreError"
    made = bare.json("db", "upgrade")
    assert made["revision"] == made["head"]
    assert made["is_current"]
    assert bare.json("db", "current", "--check") == made
    bare.schedule(delay=60)
    assert bare("db", "upgrade").exit_code == 0
    assert len(bare.json("list")["tasks"]) == 1
    bare.delays.store.tasks.cancel(int(bare.json("list")["tasks"][0]["id"]))
    assert bare.json("db", "downgrade", "-1", "--yes")["revision"] is None
    assert "run: delaytasks -A" in bare("db", "current").stdout


def test_a_downgrade_is_never_done_unasked(bare: Project) -> None:
    made = bare.json("db", "upgrade")
    assert "--yes" in bare.error("db", "downgrade", exit_code=2)["error"]
    assert bare.json("db", "current") == made


@pytest.mark.parametrize("command", [["upgrade"], ["downgrade", "--yes"]])
def test_a_revision_that_is_not_there_ends_with_2(bare: Project, command: list[str]) -> None:
    bare("db", "upgrade")
    error = bare.error("db", *command, "nowhere", exit_code=2)
    assert error["type"] == "ConfigError"
    assert "nowhere" in error["error"]


# -- the app --------------------------------------------------------------------------------------


def write(name: str, text: str) -> str:
    Path(f"{name}.py").write_text(text)
    return name


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, "No module named 'absent'"),
        ("import nowhere_at_all", "nowhere_at_all"),
        ("1 / 0", "ZeroDivisionError"),
        ("x = 1", "has no Celery app"),
        ("app = object()", "is no Celery app but a object"),
        ("from celery import Celery; app = Celery('plain')", "has no delayed tasks; make one with DelayTasks(app)"),
    ],
)
def test_an_app_that_can_not_be_used_ends_with_2_and_says_why(
    bare: Project, request: pytest.FixtureRequest, module: str | None, says: str
) -> None:
    name = "absent" if module is None else write(f"app_{abs(hash(module))}", module)
    request.addfinalizer(lambda: sys.modules.pop(name, None))
    said = CliRunner().invoke(main, ["-A", name, "list", "--json"])
    assert (said.exit_code, said.stdout) == (2, "")
    assert says in json.loads(said.stderr)["error"]
    assert json.loads(said.stderr)["type"] == "ConfigError"


def test_an_error_inside_the_app_s_module_is_shown_with_its_place(bare: Project) -> None:
    said = CliRunner().invoke(main, ["-A", write("app_that_breaks", "\n\n1 / 0"), "list"])
    assert said.exit_code == 2
    assert "app_that_breaks.py" in said.stderr
    assert "line 3" in said.stderr
    assert said.stderr.endswith(
        "Error: importing the app 'app_that_breaks' failed: ZeroDivisionError: division by zero\n"
    )


def test_the_app_comes_from_the_environment(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.schedule(delay=60)
    monkeypatch.setenv("DELAYTASKS_APP", f"{shop.name}:app")
    said = CliRunner().invoke(main, ["list", "--json"])
    assert len(json.loads(said.stdout)["tasks"]) == 1


def test_an_instance_in_a_module_that_the_app_imports_is_found(bare: Project, request: pytest.FixtureRequest) -> None:
    names = [
        write(
            "late_app", "from celery import Celery; app = Celery('late', set_as_current=False, include=['late_delays'])"
        ),
        write("late_delays", "from late_app import app; from delaytasks import DelayTasks; delays = DelayTasks(app)"),
    ]
    request.addfinalizer(lambda: [sys.modules.pop(name, None) for name in names])
    said = CliRunner().invoke(main, ["-A", "late_app", "config", "--json"])
    assert said.exit_code == 0, said.output


@pytest.mark.parametrize("name", ["DELAYTASKS_HORIZON_S", "DELAYTASKS_LEASE"])
def test_a_wrong_setting_ends_with_2(bare: Project, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "-1")
    assert bare.error("list", exit_code=2)["type"] == "ConfigError"


def test_a_database_that_is_away_ends_with_1(bare: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELAYTASKS_DATABASE_URL", f"postgresql://me:canary@127.0.0.1:{free_port()}/shop")
    said = bare("cancel", "1", "2", "3", "--json")
    assert said.exit_code == 1
    assert json.loads(said.stderr)["type"] == "StoreUnavailableError"
    assert len(json.loads(said.stdout)["failed"]) == 1
    assert "canary" not in said.output


# -- processes ------------------------------------------------------------------------------------


@pytest.fixture
def process(shop: Project, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def start(*command: str) -> subprocess.Popen[str]:
        # As an installed package would have it, whether this one is installed or not.
        information = tmp_path / "site" / "delaytasks-0.0.0.dist-info"
        information.mkdir(parents=True, exist_ok=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: delaytasks\nVersion: 0.0.0\n")
        (information / "entry_points.txt").write_text("[celery.commands]\ndelays = delaytasks.cli.main:delays\n")
        path = os.pathsep.join([str(information.parent), str(ROOT), str(tmp_path)])
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


RUN = "import sys; from delaytasks.cli.main import main; main(prog_name='delaytasks')"


def test_celery_has_the_same_commands_with_its_own_app(
    shop: Project, process: Callable[..., subprocess.Popen[str]]
) -> None:
    assert 'delays = "delaytasks.cli.main:delays"' in (ROOT / "pyproject.toml").read_text()
    ids = [str(shop.schedule(delay=60 + number).id) for number in range(3)]
    out, err = process("-m", "celery", "-A", shop.name, "delays", "list", "--json").communicate(timeout=30)
    assert [task["id"] for task in json.loads(out)["tasks"]] == ids, err
    out, err = process("-m", "celery", "-A", shop.name, "delays", "list", "--limit", "1").communicate(timeout=30)
    assert f"More: celery -A {shop.name} delays list --limit 1 --cursor " in err
    failing = process("-m", "celery", "-A", shop.name, "delays", "show", "5", "--json")
    out, err = failing.communicate(timeout=30)
    assert (failing.returncode, out, json.loads(err)["type"]) == (1, "", "TaskNotFoundError")


def test_celery_without_an_app_is_told_what_is_missing(process: Callable[..., subprocess.Popen[str]]) -> None:
    failing = process("-m", "celery", "delays", "list")
    _, err = failing.communicate(timeout=30)
    assert failing.returncode == 2
    assert "has no delayed tasks; make one with DelayTasks(app)" in err


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_pipe_that_closes_early_is_no_error_to_talk_about(
    shop: Project, process: Callable[..., subprocess.Popen[str]], option: list[str]
) -> None:
    shop.delays.schedule_many(("ok", None, 60) for _ in range(100))
    running = process("-c", RUN, "-A", shop.name, "list", *option)
    assert running.stdout is not None
    assert running.stderr is not None
    running.stdout.close()
    assert running.stderr.read() == ""
    running.wait(30)


def test_ids_can_be_cut_out_of_a_pipe(shop: Project, process: Callable[..., subprocess.Popen[str]]) -> None:
    ids = [str(shop.schedule(delay=60 + number).id) for number in range(3)]
    out, err = process("-c", RUN, "-A", shop.name, "list").communicate(timeout=30)
    assert [line.split()[0] for line in out.splitlines()] == ["id", *ids]
    assert err == ""
