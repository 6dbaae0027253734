"""The servers of a run, and a deployment whose history is recorded."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from chaos.history import History, Recurs, own_environment, read
from chaos.pids import children_of
from chaos.recorder import Recorder
from delaytasks.model.moves import LIVE
from tests import running as faketime
from tests.proxy import proxy_to
from tests.running import Deployment, Process
from tests.services import MariaDBServer, PostgresServer, RabbitServer, RedisServer

#: Leases and sweeps are short, so that a run takes minutes.
SETTINGS: dict[str, Any] = {
    "lease": 4,
    "sweep": 1,
    "_self_sweep_s": 2,
    "_grace_s": 0.5,
    "horizon": 10,
    "durable_eta": True,
}
#: A worker may start while the broker is away, and then waits longer after each attempt.
STARTED_S = 120.0


def exit_on_signals() -> None:
    """Exit on SIGTERM and SIGINT with an exception, so that the started processes are ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Shells ignore SIGINT in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Site(NamedTuple):
    """The kinds of the servers."""

    database: str
    broker: str
    timer: str

    def __str__(self) -> str:
        return f"{self.database}, {self.broker}, timer {self.timer}"


class Servers:
    """Private servers, which end with `close`. SQLite has none."""

    def __init__(
        self, folder: Path, site: Site, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start the servers; `environment` is added to that of the database."""
        self.site, self._ends = site, ExitStack()
        self.database: PostgresServer | MariaDBServer | None = None
        self.broker: RedisServer | RabbitServer
        folder.chmod(0o755)  # the database may run as another user
        self.database_url = f"sqlite:///{folder / 'chaos.sqlite3'}"
        try:
            for part in ("database", "broker"):
                (folder / part).mkdir()
            if site.database != "sqlite":
                kind: Any = MariaDBServer if site.database == "mariadb" else PostgresServer
                self.database = kind(folder / "database", environment)
                self._ends.callback(self.database.crash)
                self.database_url = self.database.url
            kind = RedisServer if site.broker == "redis" else RabbitServer
            self.broker = kind(folder / "broker")
            self._ends.callback(self.broker.stop)
            #: The value of the setting `timer`.
            self.timer = site.timer
            if site.timer == "redis" != site.broker:
                redis_server = RedisServer(folder)
                self._ends.callback(redis_server.stop)
                self.timer = redis_server.url
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._ends.close()
        faketime.forget_the_dead()


class System:
    """A deployment whose history is recorded. With `database_url_of_workers`, workers use that."""

    def __init__(
        self,
        folder: Path,
        database_url: str,
        broker_url: str,
        ahead_s: int = 0,
        database_url_of_workers: str | None = None,
        **settings: Any,
    ) -> None:
        """Make the tables. The clock of the database is `ahead_s` ahead of that of this process."""
        self.folder, self.notes = folder, folder / "notes"
        # The files that a killed pool process leaves behind are deleted with the folder.
        self.environment = {**own_environment(self.notes, ahead_s), "TMPDIR": str(folder)}
        conf: dict[str, Any] = {"imports": ["chaos.project"]}
        if database_url_of_workers is not None:
            conf["delaytasks_database_url"] = database_url_of_workers
        self.deployment = Deployment(
            folder, database_url, broker_url, conf, **{**SETTINGS, **settings}
        )
        self.recorder = Recorder(self.deployment.store)
        self.recorder.start()

    def new_worker(self, **environment: str) -> Process:
        own: dict[str, Any] = {**self.environment, **environment}
        return self.deployment.worker(ready_s=STARTED_S, **own)

    def close(self) -> None:
        """End the processes, and remove the tables and queues."""
        try:
            self.recorder.stop()
        finally:
            self.deployment.close()

    def live(self) -> int:
        """Return the number of tasks that wait or run."""
        counts = self.deployment.counted()
        return sum(counts[status] for status in LIVE)

    def history(self, recurring: Iterable[Recurs] = ()) -> History:
        history = read(self.notes, self.recorder.changes())
        history.join(recurring)
        return history


class ChaosSystem(System):
    """Servers with proxies in front of them, two workers and two beats."""

    def __init__(self, folder: Path, servers: Servers) -> None:
        self.servers, self.site = servers, servers.site
        self.is_over = threading.Event()
        self._ends = ExitStack()
        try:
            self._start(folder)
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path) -> None:
        url, broker = self.servers.database_url, self.servers.broker
        #: The proxies in front of the database: one for producers and one for workers. SQLite has
        #: none.
        self.links = [proxy_to(url) for _ in range(2)] if self.servers.database else []
        self.broker_link = proxy_to(broker.url)
        for link in (*self.links, self.broker_link):
            self._ends.callback(link.close)
        self.producers_url, workers_url = [link.url(url) for link in self.links] or [url] * 2
        broker_url = self.broker_link.url(broker.url)
        super().__init__(folder, url, broker_url, 0, workers_url, timer=self.servers.timer)
        self._ends.callback(self.deployment.kill)
        self.workers = [self.new_worker(), self.new_worker()]
        self.beats = [self.deployment.beat(), self.deployment.beat()]

    def pools(self) -> list[list[int]]:
        """Return the pool processes of each worker."""
        return [children_of(worker.pid) for worker in self.workers]

    def written(self, pid: int) -> int:
        """Return the size of a process's notes."""
        path = self.notes / f"{pid}.jsonl"
        return path.stat().st_size if path.exists() else 0

    def queues(self) -> list[str]:
        """Return the names of the queues at the broker."""
        namespace = self.deployment.settings["namespace"]
        return [f"{namespace}.default", f"{namespace}.celery"]

    def pause(self, seconds: float) -> None:
        """Sleep until the time is over or the run ends."""
        self.is_over.wait(seconds)

    def close(self) -> None:
        self.is_over.set()
        self._ends.close()
