"""The command line prints, refuses and explains commands without a database."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from delaytasks import DelayedTask
from delaytasks.cli import context, output, up
from delaytasks.cli.main import delays, main
from delaytasks.model import errors
from delaytasks.model.text import TABLES_REMEDY
from delaytasks.operate.task_calls import pretty_body
from tests.waiting import wait_until
from tests.world import MonkeyPatch

HOSTILE = "\x1b[31mred\x1b[0m [red]markup[/red] :smile: \r\n\u202eforged line\x9b1m"
NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(shown: str) -> str:
    """Return a text without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", shown)


@pytest.fixture
def terminal(monkeypatch: MonkeyPatch) -> Callable[[], Terminal]:
    """Return a function that replaces stdout.

    Call it in the test, because pytest uses stdout before.
    """

    def begin() -> Terminal:
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.delenv("NO_COLOR", raising=False)
        return screen

    return begin


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield path + name, command


OURS = [(path, command) for path, command in commands(main) if path != "up"]


# -- help -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "command"), OURS, ids=[path for path, _ in OURS])
def test_each_help_has_an_example_and_the_exit_codes(path: str, command: click.Command) -> None:
    shown = CliRunner().invoke(main, [*path.split(), "--help"])
    assert shown.exit_code == 0
    assert f"\n  delaytasks {path}" in shown.output
    assert "Exit codes: 0" in shown.output
    assert "--json" in shown.output


def test_celery_offers_the_same_commands() -> None:
    assert [path for path, _ in commands(delays)] == [path for path, _ in commands(main)]


def test_the_version_is_printed() -> None:
    shown = CliRunner().invoke(main, ["--version"])
    assert shown.exit_code == 0
    assert shown.output.startswith("delaytasks ")


def test_help_imports_no_module_that_only_some_commands_need() -> None:
    code = (
        "import sys, delaytasks; before = set(sys.modules); import delaytasks.cli.main; "
        "others = {'rich', 'alembic.command', 'delaytasks.celery', 'delaytasks.db'}; "
        "others |= {'delaytasks.cli.status', 'delaytasks.cli.up'}; "
        "others |= {'delaytasks.worker.worker_runtime'}; "
        "print(others & (set(sys.modules) - before))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


# -- errors ---------------------------------------------------------------------------------------


def all_errors(
    root: type[errors.DelayTaskError] = errors.DelayTaskError,
) -> Iterator[type[errors.DelayTaskError]]:
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
            yield from all_errors(kind)


@pytest.mark.parametrize("kind", list(all_errors()), ids=lambda kind: kind.__name__)
def test_errors_of_the_caller_exit_with_2_and_all_others_with_1(kind: Any) -> None:
    is_callers = issubclass(kind, (errors.InvalidInputError, errors.ConfigError))
    error = kind("no", "tag") if issubclass(kind, errors.InvalidInputError) else kind("no")
    assert output.Failure(error, is_json=False).exit_code == (2 if is_callers else 1)


def failing(error: Exception, *words: str, **options: Any) -> Any:
    """Run a command that raises this error."""

    @click.group(cls=type(main))
    def group() -> None: ...

    @group.command()
    def fail() -> None:
        raise error

    return CliRunner().invoke(group, words or ["fail"], **options)


def test_an_error_is_one_line_on_stderr_without_a_traceback() -> None:
    shown = failing(errors.TaskNotFoundError("there is no task 7"))
    assert (shown.exit_code, shown.stdout, shown.stderr) == (1, "", "Error: there is no task 7\n")


@pytest.mark.parametrize("words", ["fail --json", "--json fail"])
def test_an_error_is_a_json_document_if_json_is_asked_for(words: str) -> None:
    shown = failing(errors.InvalidInputError("no\nsuch delay", "delay"), *words.split())
    assert (shown.exit_code, shown.stdout) == (2, "")
    said = {"error": "no\nsuch delay", "type": "InvalidInputError", "argument": "delay"}
    assert json.loads(shown.stderr) == said


@pytest.mark.parametrize("words", ["fial --json", "fail --json --bogus", "--json --bogus"])
def test_wrong_usage_is_reported_in_json_too(words: str) -> None:
    shown = failing(Exception(), *words.split())
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert json.loads(shown.stderr)["type"].startswith("NoSuch")


def test_json_after_two_dashes_is_an_argument() -> None:
    shown = failing(Exception(), "fail", "--", "--json")
    assert shown.exit_code == 2
    assert shown.stderr.startswith("Usage:")


def test_an_error_with_untrusted_text_stays_one_harmless_line() -> None:
    shown = failing(errors.TaskStateError(HOSTILE), color=True)
    plain = shown.stderr.removeprefix("\x1b[31m").removesuffix("\x1b[0m\n")
    assert plain.isprintable()
    assert "[red]markup[/red] :smile:" in plain


# -- tables and documents -------------------------------------------------------------------------


LIST = "id,status,tag,key,when,due,queue,attempts,error"
ROW = "912516417671247403 NOT_COMPLETE newsletter.send k in_1h30m 2030-01-31T18:00:00Z default 3"


def table(error: str, tag: str = "newsletter.send", rows: int = 2) -> str:
    """Return the lines of a table on stdout."""
    cells = ROW.split()
    row = [*cells[:2], tag, *cells[3:7], 3, (error, "red")]
    extra = "due,queue,attempts,key"
    return output.text_of([output.Table(LIST, [row] * rows, "tag,key", extra, "error")])


def test_a_piped_table_has_one_plain_line_for_each_row_and_leaves_out_nothing() -> None:
    lines = table(HOSTILE, rows=1).splitlines()
    assert lines[0].split() == LIST.split(",")
    assert len(lines) == 2
    assert all(line.isprintable() and line == line.rstrip() for line in lines)
    assert r"\x1b[31mred\x1b[0m [red]markup[/red] :smile: \r\n\u202eforged line\x9b1m" in lines[1]
    assert " default         3  " in lines[1], "numbers are aligned on the right"


def test_a_table_of_objects_has_their_fields_as_people_read_them() -> None:
    queue = SimpleNamespace(name="mail", is_paused=True, late_s=90.2, ids=(1, 2), rows=1234)
    made: output.Made = {"state": lambda each: (f"{each.name} waits", "red")}
    columns = "queue=name,paused=is_paused,by=late_s,ids,rows,state"
    document = {**vars(queue), "is_paused": False, "late_s": None}
    shown = output.text_of([output.Table.of(columns, [queue], made)]).splitlines()
    assert shown[0].split() == ["queue", "paused", "by", "ids", "rows", "state"]
    assert shown[1].split() == ["mail", "yes", "1m30s", "1,", "2", "1,234", "mail", "waits"]
    [_, row] = output.text_of([output.Table.of("name,is_paused,late_s", [document])]).splitlines()
    assert row.split() == ["mail", "-", "-"]


def test_a_folded_column_shows_a_long_remedy_to_its_end() -> None:
    fact = "x" * 300 + "; run: delaytasks db upgrade"
    rows = [("database", fact)]
    assert output.text_of([output.Table("check,facts", rows, "facts")]).endswith(fact)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_a_terminal_breaks_no_tag_and_prints_errors_below_their_rows(
    terminal: Callable[[], Terminal], monkeypatch: MonkeyPatch, width: int
) -> None:
    terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    shown = table("ValueError: the customer has no address")
    lines = plain(shown).splitlines()
    assert all(len(line) <= width for line in lines)
    assert sum("newsletter.send" in line for line in lines) == 2
    assert lines[2] == lines[4] == "    ValueError: the customer has no address"
    assert "error" not in lines[0]
    assert "\x1b[31mValueError" in shown
    assert ("queue" in lines[0]) is (width >= 100), "a narrow terminal leaves out columns"


def test_a_terminal_folds_a_long_tag_and_interprets_nothing_in_it(
    terminal: Callable[[], Terminal],
) -> None:
    terminal()
    shown = table(output.NOTHING, tag="t" * 100 + HOSTILE, rows=1)
    lines = plain(shown).splitlines()
    assert all(len(line) <= 80 and line.isprintable() for line in lines)
    assert lines[1].startswith("912516417671247403  NOT_COMPLETE  ttt")
    assert r"\x1b[31mred" in "".join(line.strip().split()[0] for line in lines[2:])
    assert not any("- " in line for line in lines), "a row without an error has no line below"


TRACEBACK = (
    'Traceback (most recent call last):\n  File "a.py", line 8, in bad\n    raise\n'
    "ValueError: boom\nsecond line\n"
)


REASONS = {TRACEBACK: "ValueError: boom", "gave up": "gave up", "": "-", "  indented": "indented"}


@pytest.mark.parametrize(("error", "shown"), [*REASONS.items(), (None, "-")])
def test_the_reason_is_the_first_line_after_the_frames(error: str | None, shown: str) -> None:
    assert output.reason(error) == shown


@pytest.mark.parametrize("body", ["NaN", "[" * 200_000, "not json", "[Infinity]"])
def test_a_body_without_a_json_form_is_shown_as_its_text(body: str) -> None:
    task = DelayedTask(7, "t", body, NOON)
    document = task.as_json()
    assert document["body"] == body
    assert document["id"] == "7"
    json.dumps(document, allow_nan=False)
    assert pretty_body(task).strip() in (body, "NaN", "[\n  Infinity\n]")


def test_a_body_keeps_its_integers_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    task = DelayedTask(2**60 + 1, "t", '{"n": 9007199254740993}', NOON)
    with click.Context(main) as ctx:
        context.Cli(ctx, lambda: None, "delaytasks", "shop", "default").print_json(task.as_json())
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["id"] == str(2**60 + 1)
    assert document["body"] == {"n": 9007199254740993}


KNOWN = "its status, which delaytasks does not know"
HINTS = {
    "To run it again: delaytasks rerun 7": "To run it again: celery -A shop delays rerun 7",
    KNOWN: KNOWN,
    "Start a worker: celery -A … worker": "Start a worker: celery -A shop worker",
    f"missing; {TABLES_REMEDY}": "missing; run: celery -A shop delays db upgrade",
    "flask --app APP delays db upgrade": "celery -A shop delays db upgrade",
    "name it by its id, or by tag= and key=": "name it by its id, or by --tag and --key",
    "run: python manage.py migrate": "run: python manage.py migrate",
    "Usage: python -m delaytasks rerun": "Usage: python -m delaytasks rerun",
}


@pytest.mark.parametrize(("message", "said"), HINTS.items())
def test_a_hint_names_commands_as_the_user_called_them(message: str, said: str) -> None:
    with click.Context(main) as ctx:
        cli = context.Cli(ctx, lambda: None, "celery -A shop delays", "shop", "celery")
    assert cli.rewrite(message) == said


# -- the examples of the help are valid, and Click completes the command line ----------------------

COMMANDS = dict(commands(main))


def examples(command: click.Command) -> list[list[str]]:
    """Return the words of each example, without what a shell takes away."""
    lines = (command.help or "").replace("\\\n", " ").splitlines()
    found = [line.strip() for line in lines if line.strip().startswith(("delaytasks ", "celery "))]
    return [shlex.split(line.partition(" > ")[0]) for line in found]


@pytest.mark.parametrize("path", COMMANDS)
def test_help_examples_are_valid_calls(path: str, monkeypatch: MonkeyPatch, tmp_path: Path) -> None:
    called: list[str] = []
    monkeypatch.setattr(COMMANDS[path], "callback", lambda **_: called.append(path))
    runtime = SimpleNamespace(clock=SimpleNamespace(now=lambda: NOON))
    monkeypatch.setattr(context.Cli, "delays", SimpleNamespace(_runtime=runtime))
    monkeypatch.chdir(tmp_path)
    found = examples(COMMANDS[path])
    assert found
    for program, *words in found:
        if program == "celery":
            words = words[words.index("delays") + 1 :]
        called.clear()
        result = CliRunner().invoke(main, words)
        assert called == [path], f"{shlex.join(words)}\n{result.output}\n{result.exception}"


@pytest.mark.parametrize("path", COMMANDS)
def test_each_option_is_explained(path: str) -> None:
    options = [each for each in COMMANDS[path].params if isinstance(each, click.Option)]
    assert [option.opts for option in options if not option.help] == []


def completed(*words: str) -> list[str]:
    *before, incomplete = words
    shell = ShellComplete(main, {}, "delaytasks", "_DELAYTASKS_COMPLETE")
    return [item.value for item in shell.get_completions(before, incomplete)]


def test_commands_options_and_values_are_completed() -> None:
    assert completed("re") == ["recurring", "rerun", "reschedule", "resume"]
    assert completed("-A", "shop", "db", "up") == ["upgrade"]
    assert completed("status", "--max-") == ["--max-overdue"]
    [status] = completed("list", "--status", "FA")
    assert status.upper() == "FAILED"


# -- `up` runs processes with one log, and stops them together ------------------------------------


#: This program prints a line when it is ready, and another line when it receives SIGTERM.
POLITE = """
import signal, sys, time
def end(*_): print("bye", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("worker ready.", flush=True)
while True: time.sleep(60)
"""
STUBBORN = POLITE.replace("(signal.SIGTERM, end)", "(signal.SIGTERM, signal.SIG_IGN)")


def run_together(**programs: str) -> bool:
    """Run the programs, and stop them as soon as the worker is ready."""
    commands = {name: [sys.executable, "-c", code] for name, code in programs.items()}
    return up.run_together(commands, lambda: os.kill(os.getpid(), signal.SIGINT))


def test_a_process_that_does_not_stop_is_killed(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(up, "PATIENCE_S", 0.3)
    assert run_together(worker=STUBBORN)


def test_the_end_of_a_process_stops_the_others_and_those_that_it_has_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A worker that is killed does not end its pool processes."""
    note = tmp_path / "orphan"
    leaves = f"""
import os, pathlib, signal, subprocess, sys
orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({str(note)!r}).write_text(str(orphan.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert not run_together(worker=leaves, beat=POLITE)
    log = capfd.readouterr().out
    assert "worker has ended with the signal SIGKILL" in log
    assert log.endswith("all stopped\n")
    stat = Path(f"/proc/{note.read_text()}/stat")

    def has_ended() -> bool:
        return not stat.exists() or "Z" in stat.read_text().split(")")[1].split()[0]

    wait_until(has_ended, 5, "the process that it has left to end")


def test_a_log_line_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    up._say("worker", "no\x1b[2J\rroot │ all well")
    assert capsys.readouterr().out == "worker  │ no\\x1b[2J\\rroot │ all well\n"
