"""The command line prints, refuses and explains commands without a database."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from delaytasks.cli import context as opening
from delaytasks.cli import output
from delaytasks.cli.context import Hints
from delaytasks.cli.main import delays, main
from delaytasks.core import errors
from delaytasks.core.task import DelayedTask
from delaytasks.core.text import TABLES_REMEDY

HOSTILE = "\x1b[31mred\x1b[0m [red]markup[/red] :smile: \r\n\u202eforged line\x9b1m"
NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Terminal]:
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
def test_every_command_explains_itself_with_an_example_and_its_exit_codes(
    path: str, command: click.Command
) -> None:
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
        "others = {'rich', 'alembic.command', 'delaytasks.celery', 'delaytasks.storage'}; "
        "others |= {'delaytasks.cli.status', 'delaytasks.cli.up', 'delaytasks.worker.standalone'}; "
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


def failing_group(error: Exception) -> click.Group:
    @click.group(cls=type(main))
    def group() -> None: ...

    @group.command()
    def fail() -> None:
        raise error

    return group


def test_an_error_is_one_line_on_stderr_without_a_traceback() -> None:
    shown = CliRunner().invoke(
        failing_group(errors.TaskNotFoundError("there is no task 7")), ["fail"]
    )
    assert (shown.exit_code, shown.stdout, shown.stderr) == (1, "", "Error: there is no task 7\n")


@pytest.mark.parametrize("arguments", [["fail", "--json"], ["--json", "fail"]])
def test_an_error_is_a_json_document_if_json_is_asked_for(arguments: list[str]) -> None:
    shown = CliRunner().invoke(
        failing_group(errors.InvalidInputError("no\nsuch delay", "delay")), arguments
    )
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert json.loads(shown.stderr) == {
        "error": "no\nsuch delay",
        "type": "InvalidInputError",
        "argument": "delay",
    }


@pytest.mark.parametrize(
    "arguments", [["fial", "--json"], ["fail", "--json", "--bogus"], ["--json", "--bogus"]]
)
def test_wrong_usage_is_reported_in_json_too(arguments: list[str]) -> None:
    shown = CliRunner().invoke(failing_group(Exception()), arguments)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert json.loads(shown.stderr)["type"].startswith("NoSuch")


def test_json_after_two_dashes_is_an_argument() -> None:
    shown = CliRunner().invoke(failing_group(Exception()), ["fail", "--", "--json"])
    assert shown.exit_code == 2
    assert shown.stderr.startswith("Usage:")


def test_an_error_with_untrusted_text_stays_one_harmless_line() -> None:
    shown = CliRunner().invoke(failing_group(errors.TaskStateError(HOSTILE)), ["fail"], color=True)
    plain = shown.stderr.removeprefix("\x1b[31m").removesuffix("\x1b[0m\n")
    assert plain.isprintable()
    assert "[red]markup[/red] :smile:" in plain


# -- tables and documents -------------------------------------------------------------------------


def test_a_piped_table_has_one_plain_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(
        ("tag", "n"), [(output.cell(HOSTILE), ("1", "red")), ("long " * 60, "22")], right=["n"]
    )
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


def test_a_narrow_terminal_leaves_out_empty_and_extra_columns(
    terminal: Callable[[], Terminal],
) -> None:
    screen = terminal()
    output.print_table(
        ("id", "key", "due", "tag"), [("1", output.NOTHING, "now", "x" * 73)], extra="tag due"
    )
    assert "id" in screen.getvalue()
    assert "key" not in screen.getvalue()
    assert "due" in screen.getvalue(), "once the tag is left out there is room"
    assert "tag" not in screen.getvalue()


LIST = ("id", "status", "tag", "key", "when", "due", "queue", "attempts", "error")
ROW = [
    "912516417671247403",
    "NOT_COMPLETE",
    "newsletter.send",
    "k",
    "in 1h30m",
    "2030-01-31T18:00:00Z",
    "default",
    "3",
]


def listed(error: str, tag: str = "newsletter.send", rows: int = 2) -> None:
    row = [*ROW[:2], tag, *ROW[3:], (error, "red")]
    extra = "due queue attempts key"
    output.print_table(
        LIST, [row] * rows, right=["attempts"], folded="tag key", extra=extra, below="error"
    )


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_line_is_longer_than_the_terminal_and_no_tag_is_broken(
    terminal: Callable[[], Terminal], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    screen = terminal()
    monkeypatch.setenv("COLUMNS", str(width))
    listed("ValueError: the customer has no address, " + "and more " * 4)
    lines = plain(screen).splitlines()
    assert all(len(line) <= width for line in lines)
    assert sum("newsletter.send" in line for line in lines) == 2
    assert sum("ValueError: the customer" in line for line in lines) == 2


def test_a_terminal_prints_an_error_below_its_row(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    listed("ValueError: the customer has no address")
    lines = plain(screen).splitlines()
    first = next(number for number, line in enumerate(lines) if "newsletter" in line)
    assert lines[first + 1] == "    ValueError: the customer has no address"
    assert "error" not in lines[0] + lines[1]
    assert "\x1b[31mValueError" in screen.getvalue()


def test_a_row_without_an_error_has_no_line_below(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    rows = [[*ROW, (error, "red")] for error in ("no", output.NOTHING)]
    rows[0][2] = "x" * 30
    output.print_table(LIST, rows, folded="tag", extra="due queue attempts key", below="error")
    assert "- " not in plain(screen)
    assert plain(screen).splitlines()[-1].startswith("912516417671247403")


def test_a_tag_as_long_as_the_terminal_is_folded_and_nothing_else(
    terminal: Callable[[], Terminal],
) -> None:
    screen = terminal()
    listed("boom", tag="t" * 128, rows=1)
    lines = plain(screen).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert sum(line.count("t" * 10) for line in lines) > 1
    assert any(line.startswith("912516417671247403  NOT_COMPLETE  ttt") for line in lines)


def test_an_empty_table_has_its_headings(terminal: Callable[[], Terminal]) -> None:
    screen = terminal()
    output.print_table(LIST, [], folded="tag", extra="due", below="error")
    assert "status" in plain(screen)


def plain(screen: Terminal) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())


def test_a_pipe_leaves_out_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("id", "key", "due"), [("1", output.NOTHING, "now")], extra="due")
    assert capsys.readouterr().out.split() == ["id", "key", "due", "1", "-", "now"]


def test_a_block_keeps_its_lines_and_escapes_each() -> None:
    assert output.block("a\x1b[1m\n\tb\n") == "  a\\x1b[1m\n  \\tb"


TRACEBACK = (
    'Traceback (most recent call last):\n  File "a.py", line 8, in bad\n    raise\n'
    "ValueError: boom\nsecond line\n"
)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (TRACEBACK, "ValueError: boom"),
        ("gave up", "gave up"),
        ("", "-"),
        (None, "-"),
        ("  indented", "indented"),
    ],
)
def test_the_reason_is_the_first_line_after_the_frames(error: str | None, shown: str) -> None:
    assert output.reason(error) == shown


@pytest.mark.parametrize("body", ["NaN", "[" * 200_000, "not json", "[Infinity]"])
def test_a_body_without_a_json_form_is_shown_as_its_text(body: str) -> None:
    task = DelayedTask(7, "t", body, NOON)
    document = output.task_json(task)
    assert document["body"] == body
    assert document["id"] == "7"
    json.dumps(document, allow_nan=False)
    assert output.pretty_body(task).strip() in (body, "NaN", "[\n  Infinity\n]")


def test_a_body_keeps_its_integers_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json(
        output.task_json(DelayedTask(2**60 + 1, "t", '{"n": 9007199254740993}', NOON))
    )
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["id"] == str(2**60 + 1)
    assert document["body"] == {"n": 9007199254740993}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("To run it again: delaytasks rerun 7", "To run it again: celery -A shop delays rerun 7"),
        (
            "its status, which delaytasks does not know",
            "its status, which delaytasks does not know",
        ),
        ("Start a worker: celery -A … worker", "Start a worker: celery -A shop worker"),
        (f"missing; {TABLES_REMEDY}", "missing; run: celery -A shop delays db upgrade"),
        ("flask --app APP delays db upgrade", "celery -A shop delays db upgrade"),
        ("name it by its id, or by tag= and key=", "name it by its id, or by --tag and --key"),
        ("run: python manage.py migrate", "run: python manage.py migrate"),
        ("Usage: python -m delaytasks rerun", "Usage: python -m delaytasks rerun"),
    ],
)
def test_a_hint_names_commands_as_the_user_called_them(message: str, said: str) -> None:
    assert Hints("celery -A shop delays", ["db", "rerun"], "shop").rewrite(message) == said


@pytest.mark.parametrize(
    ("is_on_path", "program"), [(True, "delaytasks"), (False, ".venv/bin/delaytasks")]
)
def test_hints_name_a_command_that_the_shell_finds(
    is_on_path: bool, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
