"""Notices of PostgreSQL about tasks that are due soon, as workers send and receive them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from sqlalchemy import text

from delaytasks import DelayTasks
from delaytasks.broker import direct
from delaytasks.events import Events
from delaytasks.runtime import Runtime, runtime_of

#: Short times of the part of a worker that listens.
TIMES: dict[str, Any] = {"NOTICE_WAIT_S": 0.1, "RECONNECT_REST_S": 0.1}


class Notified:
    """A connection that receives the notices of an instance."""

    def __init__(self, delays: DelayTasks) -> None:
        self._runtime: Runtime = runtime_of(delays)
        found = self._runtime.store.notices.listen()
        assert found is not None
        self._listener = found
        self.close = found.close

    def count(self) -> int:
        """Return how many notices have arrived since the last count."""
        found = 0
        while arrived := len(self._listener.wait(0.2)):
            found += arrived
        return found


class ListeningWorker:
    """The part of a worker that listens to the notices of an instance."""

    def __init__(self, delays: DelayTasks) -> None:
        self.event_names: list[str] = []
        self.looks = 0
        events, self._store = Events(), runtime_of(delays).store
        events.subscribe(lambda name, fields: self.event_names.append(name))
        runtime: Any = SimpleNamespace(store=self._store, events=events)
        self._times = mock.patch.multiple(direct, **TIMES)
        self._times.start()
        self._listener = direct.NotifyListener(runtime, self._look)
        self._listener.loop.start()

    def _look(self) -> None:
        self.looks += 1

    @property
    def is_listening(self) -> bool:
        """Whether the worker has a connection that listens."""
        return self._listener.is_listening

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
