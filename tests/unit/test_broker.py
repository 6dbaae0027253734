"""A worker connects to its broker, publishes to it, and survives its refusals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
from amqp.exceptions import PreconditionFailed
from kombu.asynchronous import Hub
from kombu.connection import Connection
from kombu.entity import Queue

from tests.conftest import open_store
from tests.waiting import wait_until
from tests.world.messages import connect_in_background
from tests.world.recording import ManualTime, delays_on

# -- The event loop of a worker runs while it connects --------------------------------------------


class HubPool:
    """Registers a timer, as Celery's prefork pool does."""

    ticked = 0

    def register_with_event_loop(self, hub: Hub) -> None:
        hub.call_repeatedly(0.01, self.tick)

    def tick(self) -> None:
        self.ticked += 1


class BrokenPool:
    def register_with_event_loop(self, hub: Hub) -> None:
        raise OSError("no pipe")


def test_the_event_loop_runs_during_a_long_connect_and_is_unchanged_afterwards() -> None:
    hub, pool, is_over = Hub(), HubPool(), threading.Event()

    def transports() -> None:
        raise AssertionError("a transport's callback is not called meanwhile")

    hub.on_tick.add(transports)
    with closing(hub):
        ticks = connect_in_background(
            hub, pool, lambda: wait_until(lambda: pool.ticked, 10, "a turn of the event loop")
        )
        assert ticks
        assert all(scheduled.entry.canceled for scheduled in hub.timer.queue)
        with pytest.raises(OSError, match="no pipe"):
            connect_in_background(hub, BrokenPool(), lambda: is_over.wait(30))
        is_over.set()
        assert hub.on_tick == {transports}


# -- if a broker refuses one queue, it still receives the messages of the others ------------------


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


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Any]:
    with Connection(files_url(tmp_path)) as connection:
        yield connection.channel()


@pytest.mark.parametrize("where", ["environment", "celeryconfig", ""])
def test_the_standalone_app_uses_files_unless_a_broker_is_given(where: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    environ.pop("CELERY_BROKER_URL", None)
    if where == "environment":
        environ["CELERY_BROKER_URL"] = "redis://given:1/0"
    elif where:
        (tmp_path / "celeryconfig.py").write_text("broker_url = 'redis://given:1/0'\n")
    command = [
        sys.executable,
        "-c",
        "from delaytasks.celery import app; print(app.conf.broker_url)",
    ]
    said = subprocess.check_output(command, cwd=tmp_path, env=environ, text=True)
    assert said.strip() == ("redis://given:1/0" if where else files_url(tmp_path / ".delaytasks"))
    assert not (tmp_path / ".delaytasks").exists()


def test_bindings_are_made_and_deleted_one_by_one(channel: Any, tmp_path: Path) -> None:
    longest = f"delaytasks.{'q' * 100}"
    for queue in ("first", longest, longest):
        channel._queue_bind("news/..", queue, None, queue)
    assert {row.queue for row in channel.get_table("news/..")} == {"first", longest}
    channel._put("first", {})
    channel._delete("first", "news/..", "first", None, "first")
    assert [tuple(row) for row in channel.get_table("news/..")] == [(longest, "", longest)]
    assert channel._size("first") == 0
    shutil.rmtree(tmp_path / "broker")
    with Connection(files_url(tmp_path)) as other:
        other.channel()._put("other", {})  # makes the folder first
    with pytest.raises(Empty):
        channel._get(longest)
    assert [row.queue for row in channel.get_table("news/..")] == [longest], "it is made again"


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
