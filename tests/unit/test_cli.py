"""The command line prints, refuses and explains commands without a database."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from celery import Celery
from click.testing import CliRunner

from delaytasks import DelayTasks
from delaytasks.cli import context, output, up
from delaytasks.cli.main import main
from delaytasks.model import errors
from delaytasks.model.text import TABLES_REMEDY
from tests.doc_commands import check_ours
from tests.waiting import wait_until
from tests.world import MonkeyPatch

HOSTILE = "\x1b[31mred\x1b[0m [red]markup[/red] :smile: \r\n\u202eforged line\x9b1m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path}{name} ")
        else:
            yield path + name, command


COMMANDS = dict(commands(main))

# -- help -----------------------------------------------------------------------------------------


def examples(command: click.Command) -> list[list[str]]:
    """Return the words of each example, without what a shell takes away."""
    lines = (command.help or "").replace("\\\n", " ").splitlines()
    found = [line.strip() for line in lines if line.strip().startswith(("delaytasks ", "celery "))]
    return [shlex.split(line.partition(" > ")[0]) for line in found]


@pytest.mark.parametrize("path", COMMANDS)
def test_each_help_explains_its_options_and_has_valid_examples(path: str) -> None:
    command = COMMANDS[path]
    shown = CliRunner().invoke(main, [*path.split(), "--help"])
    assert shown.exit_code == 0
    for text in (f"\n  delaytasks {path}", "Exit codes: 0", "--json"):
        assert path == "up" or text in shown.output
    options = [each for each in command.params if isinstance(each, click.Option)]
    assert [option.opts for option in options if not option.help] == []
    for program, *words in (found := examples(command)):
        if program == "celery":
            words = words[words.index("delays") + 1 :]
        assert check_ours(words, shlex.join(words)) is command
    assert found


# -- errors ---------------------------------------------------------------------------------------


def failing(error: Exception, *words: str, **options: Any) -> Any:
    """Run a command that raises this error."""

    @click.group(cls=type(main))
    def group() -> None: ...

    @group.command()
    def fail() -> None:
        raise error

    return CliRunner().invoke(group, words or ["fail"], **options)


#: The words of a command, and how its error on stderr begins.
SAID = '{"error": "no\\nsuch delay", "type": "InvalidInputError", "argument": "delay"}'
ERRORS = {"fail --json": SAID, "--json fail": SAID, "fail -- --json": "Usage:"}
ERRORS |= dict.fromkeys(["fial --json", "fail --json --bogus", "--json --bogus"], '{"error": "No')


@pytest.mark.parametrize(("words", "begins"), ERRORS.items())
def test_an_error_is_a_json_document_if_json_is_asked_for(words: str, begins: str) -> None:
    shown = failing(errors.InvalidInputError("no\nsuch delay", "delay"), *words.split())
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith(begins)
    assert begins == "Usage:" or json.loads(shown.stderr)["type"]


def test_an_error_with_untrusted_text_is_one_harmless_line_without_a_traceback() -> None:
    shown = failing(errors.TaskStateError(HOSTILE), color=True)
    assert (shown.exit_code, shown.stdout) == (1, "")
    plain = shown.stderr.removeprefix("\x1b[31m").removesuffix("\x1b[0m\n")
    assert plain.isprintable()
    assert "Error: " in plain
    assert "[red]markup[/red] :smile:" in plain


# -- tables and documents -------------------------------------------------------------------------


LIST = "id,status,tag,key,when,due,queue,attempts,error"
ROW = "912516417671247403 NOT_COMPLETE newsletter.send k in_1h30m 2030-01-31T18:00:00Z default 3"


def table(error: str, tag: str = "newsletter.send") -> str:
    """Return the lines of a table on stdout."""
    cells = ROW.split()
    row = [*cells[:2], tag, *cells[3:7], 3, (error, "red")]
    extra = "due,queue,attempts,key"
    return output.text_of([output.Table(LIST, [row], "tag,key,error", extra)])


def test_a_piped_table_has_one_plain_line_for_each_row_and_leaves_out_nothing() -> None:
    lines = table(HOSTILE).splitlines()
    assert lines[0].split() == LIST.split(",")
    assert len(lines) == 2
    assert all(line.isprintable() and line == line.rstrip() for line in lines)
    assert r"\x1b[31mred\x1b[0m [red]markup[/red] :smile: \r\n\u202eforged line\x9b1m" in lines[1]
    assert " default         3  " in lines[1], "numbers are aligned on the right"
    rows = [("database", "x" * 300 + "; run: delaytasks db upgrade")]
    assert output.text_of([output.Table("check,facts", rows, "facts")]).endswith(rows[0][1])


def test_a_terminal_folds_a_long_tag_and_interprets_nothing_in_it(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    lines = click.unstyle(table(output.NOTHING, tag="t" * 100 + HOSTILE)).splitlines()
    assert all(len(line) <= 80 and line.isprintable() for line in lines)
    assert lines[1].startswith("912516417671247403  NOT_COMPLETE  ttt")
    assert r"\x1b[31mred" in "".join(line.strip().split()[0] for line in lines[2:])
    assert "error" not in lines[0], "no row has an error"


HINTS = {
    "To run it again: delaytasks rerun 7": "To run it again: celery -A shop delays rerun 7",
    "its status, which delaytasks does not know": "its status, which delaytasks does not know",
    f"missing; {TABLES_REMEDY}": "missing; run: celery -A shop delays db upgrade",
    "flask --app APP delays db upgrade": "celery -A shop delays db upgrade",
}


@pytest.mark.parametrize(("message", "said"), HINTS.items())
def test_a_hint_names_commands_as_the_user_called_them(message: str, said: str) -> None:
    with click.Context(main) as ctx:
        cli = context.Cli(ctx, lambda: None, "celery -A shop delays", "shop")
    assert cli.rewrite(message) == said


@pytest.mark.parametrize(
    ("broker", "settings", "said"),
    [
        ("memory://", {}, "celery -A shop worker -Q shop.default"),
        (None, {}, "delaytasks up"),
        (None, {"timer": "direct"}, "delaytasks run --forever"),
    ],
)
def test_a_remedy_starts_a_worker_that_this_deployment_can_have(
    broker: str | None, settings: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CELERY_BROKER_URL", raising=False)
    app = Celery("shop", broker=broker, set_as_current=False)
    DelayTasks(app, "sqlite://", **settings)
    with click.Context(main) as ctx:
        cli = context.Cli(ctx, lambda: app, "delaytasks", "shop")
        assert cli.rewrite("Start: celery -A … worker -Q shop.default") == f"Start: {said}"


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
    started = {name: [sys.executable, "-c", code] for name, code in programs.items()}
    return up.run_together(started, lambda: os.kill(os.getpid(), signal.SIGINT))


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
