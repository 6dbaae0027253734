"""A private database, a broker of files, and the processes of an example, in a temporary folder."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from delaytasks.attachment import file_broker_url
from delaytasks.cli.up import die_with_parent

#: Longest time for each step of an example.
STEP_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Stage:
    """Start the processes of the Celery app `app`, and stop them at the end.

    The environment of this process names the database and the broker as well, so import the
    app's module inside the `with` block.

    Parameters
    ----------
    app
        The app, as `celery -A` takes it.
    project
        The folder from which the app is imported; by default the top of the repository.
    url_variable
        The environment variable of the database's URL.
    """

    def __init__(
        self, app: str, project: Path | None = None, url_variable: str = "DELAYTASKS_DATABASE_URL"
    ) -> None:
        self._app = app
        self._path = os.pathsep.join([*([str(project)] if project else []), os.getcwd()])
        self._began_at = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="delaytasks-example-"))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._use_private_servers(url_variable)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in reversed(self._processes.values()):
            process.terminate()
            process.wait(STEP_S)
        if error is not None:
            for name in self._processes:
                print(f"--- log of {name}", self.log(name)[-3000:], sep="\n", file=sys.stderr)
        shutil.rmtree(self._folder, ignore_errors=True)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began_at:5.1f} s  {text}", flush=True)

    def run(self, module: str, *arguments: str) -> str:
        """Run a Python module as a command, show the command, and return what it prints."""
        self.say(f"$ {module} {' '.join(arguments)}")
        command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
        done = subprocess.run(
            command,
            cwd=self._folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=STEP_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{module} failed: {done.stdout}{done.stderr}")
        return done.stdout

    def make_tables(self) -> None:
        self.run("delaytasks", "-A", self._app, "db", "upgrade")

    def start_worker(self, name: str = "worker") -> None:
        """Start a worker with beat."""
        options = ["worker", "--beat", f"--schedule={self._folder / name}.beat", "--loglevel=INFO"]
        options += ["--concurrency=2", "--without-gossip", "--without-mingle", f"-n{name}@%h"]
        self.start(name, ["celery", "-A", self._app, *options], lambda log: " ready." in log)

    def start(self, name: str, words: Sequence[str], is_ready: Callable[[str], bool]) -> None:
        """Start a Python module as a process, and wait until its log shows that it is ready."""
        self.say(f"$ {' '.join(words)}")
        self._spawn(name, [sys.executable, "-W", "ignore", "-m", *words])
        self.wait_until(lambda: is_ready(self.log(name)), f"the start of {name}")

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def wait_until(self, is_so: Callable[[], object], what: str) -> None:
        """Wait until `is_so` returns a true value. Raise `TimeoutError` if that takes too long."""
        until = time.monotonic() + STEP_S
        while not is_so():
            if time.monotonic() > until:
                raise TimeoutError(f"{what} did not happen within {STEP_S:g} s")
            time.sleep(0.05)

    def _use_private_servers(self, url_variable: str) -> None:
        for name in [name for name in os.environ if name.startswith(("DELAYTASKS_", "CELERY_"))]:
            del os.environ[name]
        os.environ[url_variable] = f"sqlite:///{self._folder / 'example.sqlite3'}"
        os.environ["CELERY_BROKER_URL"] = file_broker_url(str(self._folder))

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": self._path, "PYTHONUNBUFFERED": "1"}

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env=self._environment,
                preexec_fn=die_with_parent,
            )
