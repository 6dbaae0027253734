"""Check the commands that pages and files show: that they exist, with their options and values.

`python -m tests.doc_commands PAGE` runs the commands in the shell blocks of a page: in one process,
in their order, in an empty folder with an SQLite file, an in-memory broker, the app `shop` and the
tasks that the commands name. Commands that serve, or need another server, are only checked.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import click
from celery import Celery
from celery.bin.celery import celery
from click.testing import CliRunner

from delaytasks import DelayTasks, Status, TaskNotFoundError
from delaytasks.cli.context import Cli
from delaytasks.cli.main import main
from delaytasks.db import migrations
from delaytasks.runtime import runtime_of
from tests.doc_pages import ROOT, SHELLS, Block, blocks, environment, files_test

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


# -- the commands of a page run -------------------------------------------------------------------


#: The beginnings of commands that serve, or need a broker, another database or a deployment.
_ONLY_CHECKED = (
    "import django",
    "import redbeat",
    "run --forever",
    "serve --api",
    "serve --console",
    "serve --metrics",
    "up",
)
#: The exit code 1 of these commands is an answer, such as that no worker lives.
_ANSWERS_BY_CODE = ("check", "status")
_ANSWERS = {"access": "correct horse battery staple\n" * 2}
_APP = """
from celery import Celery

from delaytasks import DelayTasks

app = Celery("shop")
app.conf.beat_schedule = {"report": {"task": "shop.report", "schedule": 3600}}
delays = DelayTasks(app)
"""


def runs_here(page: Path, block: Block) -> bool:
    """Return whether this module runs the commands of a block."""
    is_excused = block.test is not None or block.before.startswith("<!-- not run: ")
    return block.language in SHELLS and not is_excused and files_test(page) is None


class Commands:
    """The commands of a page, which run one after the other."""

    def __init__(self) -> None:
        self._delays = DelayTasks(Celery("rows", set_as_current=False))
        migrations.upgrade(runtime_of(self._delays).store.database)
        #: The output of the last command.
        self._output = ""

    def run(self, line: str) -> None:
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)  # a variable of the environment
        match words[: words.index(">")] if ">" in words else words:
            case []:
                pass
            case ["delaytasks", *rest]:
                self._run_ours(rest)
            case ["celery", "-A", app, "delays", *rest]:
                self._run_ours(["-A", app, *rest])
            case ["export", assignment]:
                name, _, value = assignment.partition("=")
                # A value that the page leaves out is the output of the command before.
                os.environ[name] = self._output.strip() if "…" in value else value
            case ["python", "-m", "venv", *_]:
                pass
            case ["python", *_] | ["cd", *_]:
                _run_in_shell(line)
            case _:
                check_command(words, line)

    def _run_ours(self, words: list[str]) -> None:
        command = words[2:] if words[0] == "-A" else words
        text = " ".join(command) + " "
        if any(text.startswith(f"{each} ") for each in _ONLY_CHECKED):
            check_command(["delaytasks", *words], text)
            return
        self._make_tasks(command)
        ctrl_c = patch("delaytasks.cli.tasks.time.sleep", side_effect=KeyboardInterrupt)
        ends = ctrl_c if "--follow" in words else nullcontext()
        with patch.object(Cli, "require_terminal"), ends:
            done = CliRunner().invoke(main, words, input=_ANSWERS.get(command[0], "y\n"))
        codes = (0, 1) if command[0] in _ANSWERS_BY_CODE else (0,)
        assert done.exit_code in codes, f"{text}\n{done.output}\n{done.exception!r}"
        self._output = done.stdout
        assert done.output, f"{text} has printed nothing"

    def _make_tasks(self, command: list[str]) -> None:
        """Make the tasks whose keys or ids the command names."""
        name, options = command[0], [*pairwise(command)]
        tag = next((value for option, value in options if option == "--tag"), "order.close")
        if name != "schedule":
            for key in (value for option, value in options if option == "--key"):
                self._delays.schedule_delay(tag, {}, "1d", key=key, on_conflict="keep")
        for id in (int(word) for word in command if re.fullmatch(r"\d{18,}", word)):
            try:
                task = self._delays.get(id)
            except TaskNotFoundError:
                task = self._delays.schedule_delay(tag, {"order": 7}, "1d", id=id)
            if name == "rerun":
                self._delays.cancel(task)
            elif task.status is Status.CANCELLED:
                self._delays.rerun(id)


def run_page(page: Path) -> None:
    Path("celeryconfig.py").write_text('delaytasks_tags = "any"  # it has no processors\n')
    for package in ("shop", "proj"):
        Path(package).mkdir()
        Path(package, "celery.py").write_text(_APP)
        Path(package, "__init__.py").write_text(f"from {package}.celery import app\n")
    commands = Commands()
    for block in blocks(page):
        if runs_here(page, block):
            for line in command_lines(block):
                commands.run(line)


def _run_in_shell(line: str) -> None:
    """Run a line in the shell, with this interpreter and a copy of the examples."""
    shutil.copytree(ROOT / "examples", "examples", dirs_exist_ok=True)
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**environment(Path.cwd()), "PATH": programs}
    del env["DELAYTASKS_DATABASE_URL"]  # it would win over the databases of the examples
    done = subprocess.run(["sh", "-c", line], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
