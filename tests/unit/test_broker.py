"""A worker connects to its broker, publishes to it, and survives its refusals."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from amqp.exceptions import PreconditionFailed
from kombu.asynchronous import Hub
from kombu.connection import Connection
from kombu.entity import Queue

from tests.conftest import open_store
from tests.waiting import wait_until
from tests.world.messages import connect_in_background
from tests.world.recording import ManualTime, delays_on


def test_the_event_loop_runs_during_a_long_connect_and_is_unchanged_afterwards() -> None:
    hub, ticks, is_over = Hub(), list[int](), threading.Event()
    pool, broken = Mock(), Mock()
    # Celery's prefork pool registers timers, too.
    pool.register_with_event_loop = lambda hub: hub.call_repeatedly(0.01, ticks.append, 1)
    broken.register_with_event_loop.side_effect = OSError("no pipe")

    def transports() -> None:
        raise AssertionError("a transport's callback is not called meanwhile")

    hub.on_tick.add(transports)
    with closing(hub):
        assert connect_in_background(
            hub, pool, lambda: wait_until(lambda: ticks, 10, "a turn of the event loop")
        )
        assert all(scheduled.entry.canceled for scheduled in hub.timer.queue)
        with pytest.raises(OSError, match="no pipe"):
            connect_in_background(hub, broken, lambda: is_over.wait(30))
        is_over.set()
        assert hub.on_tick == {transports}


def test_a_refused_queue_is_tried_again_after_its_pause_and_reported_once(
    sqlite_path: Any, time: ManualTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, declare = {"refusal.bad"}, Queue.declare

    def declare_or_refuse(queue: Queue, *arguments: Any, **options: Any) -> Any:
        if queue.name in refused:  # it exists with other arguments
            raise PreconditionFailed("inequivalent arg 'x-queue-type'")
        return declare(queue, *arguments, **options)

    def sends(queue: str) -> bool:
        """Schedule a task that is due soon, and return whether its queue has one message more."""
        before = connection.default_channel._size(f"refusal.{queue}")
        delays.schedule_delay("mail", None, 1, queue=queue)
        return bool(connection.default_channel._size(f"refusal.{queue}") == before + 1)

    monkeypatch.setattr(Queue, "declare", declare_or_refuse)
    open_store(sqlite_path()).close()
    options: dict[str, Any] = {"tags": "any", "arm": "inline", "namespace": "refusal"}
    delays = delays_on(sqlite_path(), **options)
    with closing(delays), Connection("memory://") as connection:
        assert not sends("bad")
        assert sends("good")
        refused.clear()
        assert not sends("bad"), "it rests"
        time.at += 5.1
        assert sends("bad")
        refused.add("refusal.bad")
        delays.close()  # afterwards, the publisher declares the queue again
        assert not sends("bad")
        time.at += 5.1
        assert not sends("bad")
        assert delays.events.counts["queue.refused"] == 2, "once when it begins, not at each try"


# -- A machine without services sends messages through files --------------------------------------


def files_url(folder: Path) -> str:
    return f"delaytasks-files://localhost/{folder}"


#: This program prints the messages that it receives until the message is "stop".
READER = """
import sys
from kombu import Connection
import delaytasks
with Connection(sys.argv[1], transport_options={"polling_interval": 0.001}) as connection:
    with connection.SimpleQueue("q") as queue:
        while (text := queue.get(timeout=30).payload) != "stop":
            print(text)
"""


def test_each_message_is_read_by_one_of_many_readers(tmp_path: Path) -> None:
    url = files_url(tmp_path)
    command = [sys.executable, "-c", READER, url]
    readers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    with Connection(url) as connection, connection.SimpleQueue("q", serializer="json") as queue:
        for number in [*range(200), *["stop"] * 3]:
            queue.put(f"{number}")
    read = [reader.communicate(timeout=60)[0].split() for reader in readers]
    assert [reader.returncode for reader in readers] == [0, 0, 0]
    assert sorted(int(text) for texts in read for text in texts) == [*range(200)]
