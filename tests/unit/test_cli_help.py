"""The examples of the help are valid, and shells complete the command line."""

from __future__ import annotations

import json
import os
import shlex
import shutil
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


SHELLS = ["bash", "fish", "zsh"]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_is_printed_as_text_and_as_json(shell: str) -> None:
    script = CliRunner().invoke(main, ["completion", shell]).stdout
    assert "_DELAYTASKS_COMPLETE" in script
    document = CliRunner().invoke(main, ["completion", shell, "--json"]).stdout
    assert json.loads(document)["script"].strip() == script.strip()


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_accepts_its_script(shell: str, tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(CliRunner().invoke(main, ["completion", shell]).stdout)
    check = [path_of(shell), "-n", str(file)]
    subprocess.run(check, check=True, timeout=30)
    file.write_text(file.read_text() + "\n)")
    assert subprocess.run(check, capture_output=True, timeout=30).returncode != 0


def path_of(shell: str) -> str:
    if (program := shutil.which(shell)) is None:
        pytest.skip(f"needs {shell}, which is not available on this machine")
    return program


@pytest.mark.parametrize(
    ("shell", "asked"),
    [
        (
            "bash",
            "COMP_WORDS=(delaytasks sta); COMP_CWORD=1; _delaytasks_completion delaytasks sta; "
            'echo "${COMPREPLY[@]}"',
        ),
        ("fish", "complete -C 'delaytasks sta'"),
    ],
)
def test_a_shell_completes_the_command(shell: str, asked: str, tmp_path: Path) -> None:
    program = tmp_path / "delaytasks"
    program.write_text(
        f"#!{sys.executable}\nfrom delaytasks.cli.main import main\nmain(prog_name='delaytasks')\n"
    )
    program.chmod(0o755)
    script = CliRunner().invoke(main, ["completion", shell]).stdout
    shown = subprocess.run(
        [path_of(shell), "-c", f"{script}\n{asked}"],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout.split()[:1] == ["status"], shown.stderr
