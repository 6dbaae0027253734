"""Check the commands that pages and files show: that they exist, with their options and values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import click
from celery.bin.celery import celery
from click.testing import CliRunner

from delaytasks.cli.context import Cli
from delaytasks.cli.main import main
from tests.doc_pages import ROOT, Block

NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)


def command_lines(block: Block) -> Iterator[str]:
    """Yield the commands of a shell block. In a `console` block they begin with `$`."""
    for line in block.text.splitlines():
        if block.language != "console":
            yield line
        elif line.startswith("$ "):
            yield line.removeprefix("$ ")


def check_command(words: list[str], where: str) -> None:
    """Check a command of ours, of Celery, of `./dev` or of pip. Others may be anything."""
    match words:
        case ["./dev", name, *rest]:
            _check_dev(name, rest, where)
        case ["celery" | "flask" | "python", *_] if "delays" in words:
            check_ours(words[words.index("delays") + 1 :], where)
        case ["celery", *rest]:
            _follow(celery, rest, where)
        case ["delaytasks", *rest]:
            check_ours(rest, where)
        case ["pip", "install", *names]:
            for extra in re.findall(r"\[([\w,-]+)\]", " ".join(names)):
                assert set(extra.split(",")) <= extras(), where


def check_ours(words: list[str], where: str) -> click.Command:
    """Call a command with all but its function, and return the command."""
    command = _follow(main, words, where)
    runtime = SimpleNamespace(clock=SimpleNamespace(now=lambda: NOON))
    delays = SimpleNamespace(_runtime=runtime)
    with patch.object(command, "callback", lambda **_: None), patch.object(Cli, "delays", delays):
        result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, f"{where}: {result.output}\n{result.exception}"
    return command


def _follow(command: click.Command, words: list[str], where: str) -> click.Command:
    """Follow the words into subcommands. Each option must belong to its command."""
    while True:
        context = click.Context(command)
        try:
            _, words, _ = command.make_parser(context).parse_args(words.copy())
        except click.UsageError as error:
            raise AssertionError(f"{where}: {command.name}: {error.format_message()}") from None
        # The command `flower` exists only where Flower is installed.
        if not isinstance(command, click.Group) or words[:1] in ([], ["flower"]):
            return command
        name, *words = words
        inner = command.get_command(context, name)
        assert inner is not None, f"{where}: {command.name} has no command {name}"
        command = inner


def _check_dev(name: str, words: list[str], where: str) -> None:
    """Find the case of a command in `dev`, and its options in the source of what it runs."""
    names = rf"(?:[\w |-]+\| )?{name}(?: \|[\w |-]+)?"
    found = re.search(rf"(?ms)^    {names}\)(.*?);;$", (ROOT / "dev").read_text())
    assert found is not None, f"{where}: ./dev has no command {name}"
    for option in (word for word in words if word.startswith("--")):
        package = re.findall(r"-m (\w+)", found[1])[-1]
        assert f'"{option}"' in _source(package), f"{where}: {option}"


@cache
def _source(package: str) -> str:
    folder, files = ("tests", "conftest.py") if package == "pytest" else (package, "**/*.py")
    return "".join(path.read_text() for path in (ROOT / folder).glob(files))


@cache
def extras() -> set[str]:
    """Return the optional dependencies of the package."""
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    return {*re.findall(r"^([\w-]+) = \[", text.partition("\n[")[0], re.MULTILINE)}
