"""Follow "A first task" of docs/django.md, and those with Flask and FastAPI of docs/frameworks.md.

The files and the commands are those of the page, in their order, and then the tests of
docs/testing.md. With DELAYTASKS_TEST_PYTHON, they run in the environment of that interpreter, for
example one that has only the built wheel.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from tests.doc_pages import ROOT, SHELLS, Block, section
from tests.running import Process, clean_environment
from tests.services import RedisServer, free_port
from tests.waiting import wait_until

#: The beginning of a command that serves, and what its log has when it is ready.
SERVERS = {
    "python manage.py runserver": "Starting development server",
    "flask --app shop run": "Running on",
    "uvicorn": "startup complete",
    "celery -A shop worker": " ready.",
    "celery -A shop beat": " is starting.",
    "python manage.py delays run": "Runs tasks",
    "flask --app shop delays run": "Runs tasks",
    "celery -A shop delays run": "Runs tasks",
}
BROKER = '"redis://localhost:6379/0"'
WORKER = "celery -A shop worker -B --loglevel INFO"
DIRECT = {'{"namespace": "shop"}': '{"namespace": "shop", "timer": "direct"}'}
#: What a reader without Redis writes instead, as the pages say.
WITHOUT_REDIS = {
    "Django": {
        **DIRECT,
        f"CELERY_BROKER_URL = {BROKER}": "",
        WORKER: "python manage.py delays run --forever",
    },
    "Flask-SQLAlchemy": {
        **DIRECT,
        f'{{"broker_url": {BROKER}}}': "{}",
        WORKER: "flask --app shop delays run --forever",
    },
    "FastAPI and asyncio": {
        f'"shop", broker={BROKER}': '"shop"',
        "DelayTasks(app, DATABASE_URL)": 'DelayTasks(app, DATABASE_URL, timer="direct")',
        WORKER: "celery -A shop delays run --forever",
    },
}
#: The environment of the test has this already.
SKIPPED = ("python -m venv", ". .venv/bin/activate", "pip install")


class Reader:
    """A reader who follows a page in an empty folder."""

    def __init__(self, folder: Path, own: Mapping[str, str]) -> None:
        self.folder = folder
        #: What the reader has or writes, by the words of the page.
        self._own = {**own, "8000": str(free_port())}
        python = os.environ.get("DELAYTASKS_TEST_PYTHON", sys.executable)
        path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
        self._environment = clean_environment(PATH=path, PYTHONUNBUFFERED="1")
        self._processes: list[Process] = []

    def copy(self, found: list[Block]) -> None:
        """Write the blocks that are files; one of settings is added to those that exist."""
        for block in found:
            if block.file is not None:
                path = self.folder / block.file
                path.parent.mkdir(exist_ok=True)
                begun = path.read_text() if path.name == "settings.py" else ""
                path.write_text(begun + self._with_own(block.text))

    def _with_own(self, text: str) -> str:
        for given, own in self._own.items():
            text = text.replace(given, own)
        return text

    def do(self, line: str) -> None:
        """Run a command, or start a server."""
        command, _, comment = self._with_own(line).partition("    #")
        server = next((each for each in SERVERS if command.startswith(each)), None)
        if server is not None:
            self._start(command, SERVERS[server])
        elif "DONE" in comment:
            wait_until(lambda: "DONE" in self._run(command), 40, f"{line}\n{self.logs()}", 0.2)
        elif comment.startswith(" {"):
            assert json.loads(self._run(command)) == json.loads(comment), f"{line}\n{self.logs()}"
        elif not command.startswith(SKIPPED):
            self._run(command)

    def _run(self, command: str) -> str:
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def _start(self, command: str, ready: str) -> None:
        log = self.folder / f"{len(self._processes)}.log"
        child = Process(["sh", "-c", f"exec {command}"], self._environment, log)
        self._processes.append(child)
        child.wait_for(ready, 30)

    def logs(self) -> str:
        return "\n".join(process.log()[-5000:] for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("has_redis", [True, False], ids=["redis", "direct"])
@pytest.mark.parametrize(
    ("name", "heading", "more", "tests"),
    [
        ("django", "A first task", "Command line", "Django"),
        ("frameworks", "A first task with Flask", "Flask", "Flask-SQLAlchemy"),
        ("frameworks", "A first task with FastAPI", "FastAPI", "FastAPI and asyncio"),
    ],
)
def test_a_reader_sees_the_task_done_and_tests_pass(
    name: str,
    heading: str,
    more: str,
    tests: str,
    has_redis: bool,
    tmp_path: Path,
    start_redis: Callable[..., RedisServer],
) -> None:
    own = {BROKER: f'"{start_redis().url}"'} if has_redis else WITHOUT_REDIS[tests]
    folder = tmp_path / "reader"
    folder.mkdir()
    with closing(Reader(folder, own)) as reader:
        follow(reader, name, heading, more, tests)


def follow(reader: Reader, name: str, heading: str, more: str, tests: str) -> None:
    page = ROOT / f"docs/{name}.md"
    first_task = section(page, heading)
    for block in [*first_task, *section(page, more)]:
        if block is first_task[-1]:  # it runs the tests, which the reader has copied
            reader.copy(section(ROOT / "docs/testing.md", tests))
        if block in first_task:
            reader.copy([block])
        if block.language in SHELLS:
            for line in block.text.splitlines():
                reader.do(line)
