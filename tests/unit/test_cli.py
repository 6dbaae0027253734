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
from rich.console import Console

from delaytasks import DelayedTask
from delaytasks.cli import context, output
from delaytasks.cli import context as opening
from delaytasks.cli.context import Hints
from delaytasks.cli.main import delays, main
from delaytasks.cli.up import CombinedLog, Spec, Supervisor
from delaytasks.model import errors
from delaytasks.model.text import TABLES_REMEDY
from delaytasks.operate.single_tasks import pretty_body
from tests.running import ROOT
from tests.world import MonkeyPatch

HOSTILE = "\x1b[31mred\x1b[0m [red]markup[/red] :smile: \r\n\u202eforged line\x9b1m"
NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """Return the lines without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue()).splitlines()


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


def test_a_piped_table_has_one_plain_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(output.cell(HOSTILE), ("1", "red")), ("long " * 60, "22")]
    output.print_table(("tag", "n"), rows, right=["n"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.isprintable() and line == line.rstrip() for line in lines)
    assert r"\x1b[31mred\x1b[0m [red]markup[/red] :smile: \r\n\u202eforged line\x9b1m" in lines[1]
    assert lines[1].endswith("  1")


def test_a_folded_column_shows_a_long_remedy_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    fact = "x" * 300 + "; run: delaytasks db upgrade"
    output.print_table(("check", "facts"), [("database", fact)], folded="facts")
    assert capsys.readouterr().out.endswith(f"{fact}\n")


def test_a_terminal_s_table_has_our_colours_only(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    output.print_table(("tag", "status"), [(output.cell(HOSTILE), ("FAILED", "red"))], folded="tag")
    shown = screen.getvalue()
    assert "\x1b[31mFAILED" in shown
    assert r"\x1b[31mred" in shown
    assert "[red]markup[/red]" in shown
    assert "\x9b" not in shown
    assert "\u202e" not in shown


def test_a_narrow_terminal_has_no_empty_and_extra_columns(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    row = ("1", output.NOTHING, "now", "x" * 73)
    output.print_table(("id", "key", "due", "tag"), [row], extra="tag due")
    headings = screen.lines()[0].split()
    assert headings == ["id", "due"], "once the tag is left out there is room"


LIST = ("id", "status", "tag", "key", "when", "due", "queue", "attempts", "error")
ROW = "912516417671247403 NOT_COMPLETE newsletter.send k in_1h30m 2030-01-31T18:00:00Z default 3"
OPTIONS: dict[str, Any] = {"extra": "due queue attempts key", "below": "error"}


def listed(error: str, tag: str = "newsletter.send", rows: int = 2) -> None:
    cells = ROW.split()
    row = [*cells[:2], tag, *cells[3:], (error, "red")]
    output.print_table(LIST, [row] * rows, right=["attempts"], folded="tag key", **OPTIONS)


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_line_is_longer_than_the_terminal_and_no_tag_is_broken(
    terminal: Callable[[], Terminal], monkeypatch: MonkeyPatch, width: int
) -> None:
    screen = terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    listed("ValueError: the customer has no address, " + "and more " * 4)
    lines = screen.lines()
    assert all(len(line) <= width for line in lines)
    assert sum("newsletter.send" in line for line in lines) == 2
    assert sum("ValueError: the customer" in line for line in lines) == 2


def test_a_terminal_prints_an_error_below_its_row(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    listed("ValueError: the customer has no address")
    lines = screen.lines()
    first = next(number for number, line in enumerate(lines) if "newsletter" in line)
    assert lines[first + 1] == "    ValueError: the customer has no address"
    assert "error" not in lines[0] + lines[1]
    assert "\x1b[31mValueError" in screen.getvalue()


def test_a_row_without_an_error_has_no_line_below(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    rows = [[*ROW.split(), (error, "red")] for error in ("no", output.NOTHING)]
    rows[0][2] = "x" * 30
    output.print_table(LIST, rows, folded="tag", **OPTIONS)
    assert not any("- " in line for line in screen.lines())
    assert screen.lines()[-1].startswith("912516417671247403")


def test_only_a_tag_as_long_as_the_terminal_is_folded(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    listed("boom", tag="t" * 128, rows=1)
    lines = screen.lines()
    assert all(len(line) <= 80 for line in lines)
    assert sum(line.count("t" * 10) for line in lines) > 1
    assert any(line.startswith("912516417671247403  NOT_COMPLETE  ttt") for line in lines)


def test_an_empty_table_has_its_headings(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    output.print_table(LIST, [], folded="tag", extra="due", below="error")
    assert "status" in screen.lines()[0]


def test_a_pipe_leaves_out_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("id", "key", "due"), [("1", output.NOTHING, "now")], extra="due")
    assert capsys.readouterr().out.split() == ["id", "key", "due", "1", "-", "now"]


def test_a_block_keeps_its_lines_and_escapes_each() -> None:
    assert output.block("a\x1b[1m\n\tb\n") == "  a\\x1b[1m\n  \\tb"


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
    output.print_json(task.as_json())
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
    assert Hints("celery -A shop delays", ["db", "rerun"], "shop").rewrite(message) == said


@pytest.mark.parametrize(
    ("is_on_path", "program"), [(True, "delaytasks"), (False, ".venv/bin/delaytasks")]
)
def test_hints_name_a_command_that_the_shell_finds(
    is_on_path: bool, program: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """`./dev up` starts the program by its path."""
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    script = folder / "delaytasks"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [".venv/bin/delaytasks", "up"])
    monkeypatch.setenv("PATH", str(folder) if is_on_path else str(tmp_path))
    assert opening._program() == program


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
    assert completed("status", "--max-") == ["--max-overdue", "--max-sweep-age"]
    [status] = completed("list", "--status", "FA")
    assert status.upper() == "FAILED"


def test_click_makes_the_script_that_operations_md_names() -> None:
    code = "from delaytasks.cli.main import main; main(prog_name='delaytasks')"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "_DELAYTASKS_COMPLETE": "bash_source", "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "_delaytasks_completion" in shown.stdout


# -- the supervisor of `up` starts children in order, restarts dead ones, and stops them -----------


#: This program prints a line when it is ready, and another line when it receives SIGTERM.
POLITE = """
import signal, sys, time
def end(*_): print("bye", flush=True); sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
while True: time.sleep(60)
"""
STUBBORN = POLITE.replace("(signal.SIGTERM, end)", "(signal.SIGTERM, signal.SIG_IGN)")


def spec(name: str, code: str = POLITE, stage: int = 0, patience_s: float = 10.0) -> Spec:
    return Spec(name, [sys.executable, "-c", code], "cyan", stage, patience_s, ready_line="ready")


def supervise(*specs: Spec) -> str:
    """Run the children until all are ready, stop them, and return the log."""
    if os.name != "posix":
        pytest.skip("up runs on Linux and macOS")
    said = io.StringIO()
    supervisor = Supervisor(specs, Console(file=said, width=200))
    supervisor.run(lambda: os.kill(os.getpid(), signal.SIGINT))
    return said.getvalue()


def test_the_child_that_started_first_is_stopped_last() -> None:
    log = supervise(spec("first", stage=0), spec("second", stage=1), spec("third", stage=2))
    assert re.findall(r"(\w+) +│ bye", log) == ["third", "second", "first"]


def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    dies_once = (
        f"import os, pathlib; p = pathlib.Path({str(tmp_path / 'died')!r})\n"
        "if not p.exists(): p.touch(); os._exit(3)\n"
    )
    log = supervise(spec("child", dies_once + POLITE))
    assert "child ended with exit code 3; it is started again in 1 s" in log
    assert "child │ ready" in log


def test_a_child_that_does_not_stop_is_killed() -> None:
    log = supervise(spec("child", STUBBORN, patience_s=0.3))
    assert "killing child: it did not stop within 0.3 s" in log


def test_processes_of_a_dead_child_are_killed(tmp_path: Path) -> None:
    """A worker that is killed does not end its pool processes."""
    note = tmp_path / "orphan"
    leaves = f"""
import os, pathlib, signal, subprocess, sys
note = pathlib.Path({str(note)!r})
if not note.exists():
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note.write_text(str(orphan.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    log = supervise(spec("child", leaves + POLITE))
    assert "child was killed by SIGKILL" in log
    pid = int(note.read_text())
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or "Z" in stat.read_text().split(")")[1].split()[0]


def test_a_log_line_cannot_move_the_cursor_and_keeps_its_level() -> None:
    said = io.StringIO()
    screen = Console(file=said, width=200, force_terminal=True, color_system="standard")
    log = CombinedLog(screen, ["worker"])
    text = "[2026-01-01 10:00:00,123: ERROR/MainProcess] no\x1b[2J\rroot │ all well\n"
    log.line(spec("worker"), text)
    line = said.getvalue()
    assert "\x1b[2J" not in line
    assert "\r" not in line
    assert "MainProcess" not in line
    assert "\x1b[1;31mno" in line
