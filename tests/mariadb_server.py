"""A private MariaDB server that tests can kill and restart."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pymysql

from tests.services import MissingServiceError, free_port
from tests.waiting import wait_until

NAME = "delaytasks"


class MariaDBServer:
    """A MariaDB of the machine's own programs, on a private port and socket.

    `more` is added to its environment, `options` to its command line.
    """

    def __init__(
        self, folder: Path, more: Mapping[str, str] | None = None, options: Sequence[str] = ()
    ) -> None:
        install, program = _program("mariadb-install-db"), _program("mariadbd")
        self._folder, self._environment = folder, {**os.environ, **(more or {})}
        self._port = free_port()
        self.url = f"mysql+pymysql://root@127.0.0.1:{self._port}/{NAME}"
        data = folder / "data"
        # It runs as root only if the account is named explicitly.
        account = f"--user={getpass.getuser()}"
        made = subprocess.run(
            [
                install,
                "--no-defaults",
                account,
                f"--datadir={data}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            ],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            raise MissingServiceError(
                f"mariadb-install-db printed: {(made.stderr + made.stdout).strip()[-300:]}"
            )
        self._command = [
            program,
            "--no-defaults",
            account,
            f"--datadir={data}",
            "--bind-address=127.0.0.1",
            f"--port={self._port}",
            f"--socket={folder / 'socket'}",
            f"--pid-file={folder / 'pid'}",
            "--innodb-flush-log-at-trx-commit=2",
            "--innodb-buffer-pool-size=128M",
            "--max-connections=300",
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()
        self.execute(f"CREATE DATABASE {NAME} CHARACTER SET utf8mb4", database=None)

    def start(self) -> None:
        path = self._folder / "log"
        with path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            wait_until(self._answers, 60, "the test's MariaDB", every_s=0.05)
        except AssertionError as error:
            self.stop(signal.SIGKILL)
            raise AssertionError(
                f"{error}; its log: {path.read_text(errors='replace')[-800:]}"
            ) from None

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def crash(self) -> None:
        """Kill the server, which has to recover at its next start."""
        self.stop(signal.SIGKILL)

    def execute(self, statement: str, database: str | None = NAME) -> None:
        connection = pymysql.connect(
            host="127.0.0.1",
            port=self._port,
            user="root",
            database=database,
            connect_timeout=2,
            autocommit=True,
        )
        try:
            connection.cursor().execute(statement)
        finally:
            connection.close()

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1", database=None)
        except pymysql.MySQLError:
            return False
        return True


def _program(name: str) -> str:
    # Distributions install servers in folders of root's PATH only.
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin:/usr/libexec")
    if found is None:
        raise MissingServiceError(f"no {name} on this machine")
    return found
