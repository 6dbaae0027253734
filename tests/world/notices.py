"""Notices of PostgreSQL about tasks that are due soon, as workers send and receive them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from sqlalchemy import text

from delaytasks import DelayTasks
from delaytasks.broker.arming import read_notice
from delaytasks.db.statements import Notices
from delaytasks.events import Events
from delaytasks.model.task import Entry
from delaytasks.runtime import Runtime, runtime_of
from delaytasks.worker import pollers
from tests.waiting import wait_until

#: Short times of the part of a worker that listens.
TIMES: dict[str, Any] = {"NOTICE_WAIT_S": 0.1, "TEST_ANSWER_S": 1, "RECONNECT_REST_S": 0.1}
TIMES["TEST_EVERY_S"] = 0.5


class Notified:
    """A connection that receives the notices of an instance."""

    def __init__(self, delays: DelayTasks) -> None:
        self._runtime: Runtime = runtime_of(delays)
        found = self._runtime.store.notices.listen()
        assert found is not None
        self._listener = found
        self.close = found.close

    def received(self) -> list[Entry]:
        """Return the entries of the notices that were sent before."""
        return [entry for payload in self.payloads() for entry in read_notice(payload)]

    def payloads(self) -> list[str]:
        """Return the notices that were sent before."""
        self.send("end")
        found: list[str] = []

        def has_ended() -> bool:
            found.extend(self._listener.wait(1))
            return found[-1:] == ["end"]

        wait_until(has_ended, 10, "the end")
        return found[:-1]

    def send(self, *payloads: str) -> None:
        """Send notices, as any client of the database can."""
        self._runtime.store.notices.send(payloads)

    def arm(self, entries: Sequence[Entry]) -> None:
        assert self._runtime.direct_timer is not None
        self._runtime.direct_timer.arm(entries)

    def request_look(self) -> None:
        """Let the workers read the table now."""
        assert self._runtime.direct_timer is not None
        self._runtime.direct_timer.request_poll()


class ListeningWorker:
    """The part of a worker that listens to the notices of an instance."""

    def __init__(self, delays: DelayTasks) -> None:
        self.entries: list[Entry] = []
        self.refused: list[Exception] = []
        self.event_names: list[str] = []
        self.looks = 0
        events, self._store = Events(), runtime_of(delays).store
        events.subscribe(lambda name, fields: self.event_names.append(name))
        events.refuse = lambda kind, error: self.refused.append(error)  # type: ignore[method-assign]
        runtime: Any = SimpleNamespace(store=self._store, events=events)
        self._times = mock.patch.multiple(pollers, **TIMES)
        self._times.start()
        self._listener = pollers.NotifyListener(runtime, self.entries.extend, self._look)
        self._listener.loop.start()

    def _look(self) -> None:
        self.looks += 1

    @property
    def is_listening(self) -> bool:
        """Whether the worker knows that it receives all notices."""
        return self._listener.is_listening

    def gives_up(self) -> bool:
        """Return whether the worker finds that it will never receive notices."""
        return self._listener._turn() is None

    def close(self) -> None:
        self._listener.loop.stop()
        self._times.stop()

    def end_connection(self) -> None:
        """End the connection that listens, as a restart of the server does."""
        ended = text(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE query = :listen AND datname = current_database()"
        )
        listen = {"listen": f'LISTEN "{self._store.notices.channel}"'}
        with self._store.database.auto.connect() as connection:
            assert connection.execute(ended, listen).scalars().all() == [True]

    @staticmethod
    @contextmanager
    def behind_a_pooler() -> Iterator[None]:
        """Drop notices, as a pooler that sends and listens on different connections."""
        with mock.patch.object(Notices, "send"):
            yield
