"""The examples of the help are valid, and Click completes the command line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from delaytasks.cli import context
from delaytasks.cli.main import main
from tests.running import ROOT
from tests.unit.test_cli import NOON, commands

COMMANDS = dict(commands(main))


def examples(command: click.Command) -> list[list[str]]:
    """Return the words of each example, without what a shell takes away."""
    lines = (command.help or "").replace("\\\n", " ").splitlines()
    found = [line.strip() for line in lines if line.strip().startswith(("delaytasks ", "celery "))]
    return [shlex.split(line.partition(" > ")[0]) for line in found]


@pytest.mark.parametrize("path", COMMANDS)
def test_each_example_of_the_help_is_a_valid_call_of_its_command(
    path: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    command = [
        sys.executable,
        "-c",
        "from delaytasks.cli.main import main; main(prog_name='delaytasks')",
    ]
    environment = {**os.environ, "_DELAYTASKS_COMPLETE": "bash_source", "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "_delaytasks_completion" in shown.stdout
