"""The deployment of a chaos run: servers, proxies in front of them, two workers and two beats."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import func, select

from chaos.brokers import Broker, start_broker
from chaos.celery_messages import NOTES
from chaos.pids import children_of
from chaos.project import time_environment
from chaos.recorder import Recorder
from delaytasks.db.store import Store
from delaytasks.model.moves import LIVE
from delaytasks.settings import load_settings
from tests import running as faketime
from tests.proxy import Proxy, proxy_to
from tests.running import Deployment, Process
from tests.services import MariaDBServer, PostgresServer, RedisServer

#: Leases and sweeps are short, so that a run takes minutes.
SETTINGS: dict[str, Any] = {
    "lease": 4,
    "sweep": 1,
    "_self_sweep_s": 2,
    "_grace_s": 0.5,
    "horizon": 10,
    "durable_eta": True,
}
#: The modules that workers import.
PROJECT = ("chaos.project", "chaos.celery_messages")
#: A worker may start while the broker is away, and then waits longer after each attempt.
STARTED_S = 120.0


def exit_on_signals() -> None:
    """Exit on SIGTERM and SIGINT with an exception, so that the started processes are ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # Shells ignore SIGINT in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class ServerChoice(NamedTuple):
    """The servers of a run."""

    database: str
    broker: str
    timer: str

    def __str__(self) -> str:
        return f"{self.database}, {self.broker}, timer {self.timer}"


class SystemUnderTest:
    def __init__(self, folder: Path, site: ServerChoice) -> None:
        self.site, self.notes = site, folder / "notes"
        self.is_over = threading.Event()
        #: The cleanup functions, called in reverse order.
        self._ends: list[Callable[[], object]] = []
        try:
            self._start(folder)
        except BaseException:
            self.close()
            raise

    def _start(self, folder: Path) -> None:
        self.database = self._database(folder)
        self.database_url = (
            self.database.url if self.database else f"sqlite:///{folder / 'chaos.sqlite3'}"
        )
        self.broker: Broker = start_broker(self.site.broker, folder)
        self._ends.append(self.broker.stop)
        #: The proxies in front of the database: one for producers and one for workers. SQLite has
        #: none.
        self.links = [self._link(self.database_url) for _ in range(2)] if self.database else []
        producers, workers = [link.url(self.database_url) for link in self.links] or [
            self.database_url
        ] * 2
        self.broker_link = self._link(self.broker.url)
        broker_url = self.broker_link.url(self.broker.url)
        settings = {**SETTINGS, "timer": self.site.timer}
        if self.site.timer == "redis" and self.site.broker == "rabbitmq":
            redis_server = RedisServer(folder)
            self._ends.append(redis_server.stop)
            settings["timer"] = redis_server.url
        self.producers_url = producers
        self.deployment = Deployment(
            folder,
            workers,
            broker_url,
            {"imports": ["chaos.project", "chaos.celery_messages"]},
            **settings,
        )
        self._ends.append(self.deployment.kill)
        names = {name: self.deployment.settings[name] for name in ("namespace", "table_prefix")}
        self.store = Store(
            self.database_url, load_settings({}, {}, database_url=self.database_url, **names)
        )
        self.recorder = Recorder(self.store)
        self.recorder.start()
        self.workers = [self.new_worker(), self.new_worker()]
        self.beats = [self.new_beat(), self.new_beat()]

    def new_worker(self, **environment: str) -> Process:
        # The files that a killed pool process leaves behind are deleted with the folder.
        own: dict[str, Any] = {
            **time_environment(),
            "TMPDIR": str(self.deployment.folder),
            NOTES: str(self.notes),
        }
        return self.deployment.worker(ready_s=STARTED_S, **{**own, **environment})

    def new_beat(self, **environment: str) -> Process:
        return self.deployment.beat(**environment)

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

    def heal(self) -> None:
        for link in (*self.links, *([self.broker_link] if self.broker_link else [])):
            link.heal()

    def close(self) -> None:
        """End all processes, and ignore their errors."""
        self.is_over.set()
        while self._ends:
            try:
                self._ends.pop()()
            except Exception:
                continue  # the process is gone or never started
        faketime.forget_the_dead()

    def waiting(self) -> int:
        t = self.store.schema.tasks
        live = select(func.count()).where(t.c.status.in_([int(status) for status in LIVE]))
        return int(self.store.database.autocommitted(lambda c: c.execute(live).scalar_one()))

    def _database(self, folder: Path) -> PostgresServer | MariaDBServer | None:
        if self.site.database == "sqlite":
            return None
        database_folder = folder / "database"
        database_folder.mkdir()
        server: PostgresServer | MariaDBServer
        if self.site.database == "mariadb":
            server = MariaDBServer(database_folder)
        else:
            server = PostgresServer(database_folder)
        self._ends.append(server.crash)
        return server

    def _link(self, url: str) -> Proxy:
        link = proxy_to(url)
        self._ends.append(link.close)
        return link
