"""The broker of a run: what is ours there is gone afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kombu.exceptions import OperationalError

from benchmarks import machine, redis_server
from benchmarks.ours import app, delays
from benchmarks.waiting import BenchError
from benchmarks.where import BARE_QUEUE, NAMESPACES, broker_url, redis_url
from delaytasks.timers.eta import RUN

IS_REDIS = redis_url() == broker_url()


def check() -> None:
    with app.connection_for_write() as connection:
        try:
            connection.ensure_connection(max_retries=1, interval_start=0)
        except OperationalError as error:
            raise BenchError(
                f"the broker {connection.as_uri()} does not answer ({error}): set DELAYTASKS_BENCH_BROKER_URL"
            ) from error
    if redis_server.is_up():
        redis_server.check()


def clear() -> None:
    if redis_server.is_up():
        redis_server.clear()
    if IS_REDIS:
        return
    with app.connection_for_write() as connection:
        delete_queues(connection)


def delete_queues(connection: Any) -> None:
    for name in (BARE_QUEUE, "bench_idle", *map(queue_name, NAMESPACES)):
        for delete in (
            connection.default_channel.queue_delete,
            connection.default_channel.exchange_delete,
        ):
            try:
                delete(name)
            except connection.channel_errors:
                connection.default_channel.close()


def describe() -> str:
    if IS_REDIS:
        return redis_server.version()
    with app.connection_for_write() as connection:
        connection.ensure_connection(max_retries=1)
        properties = connection.connection.server_properties
        return f"{properties.get('product', '?')} {properties.get('version', '?')}"


def waiting(queue: str) -> int:
    """Messages that no worker has taken in."""
    with counting(queue) as count:
        return count()


@contextmanager
def counting(queue: str) -> Iterator[Callable[[], int]]:
    """The same, asked again and again on one connection."""
    with app.connection_for_write() as connection:

        def count() -> int:
            try:
                return int(
                    connection.default_channel.queue_declare(queue, passive=True).message_count
                )
            except connection.channel_errors:
                return 0  # Redis has no empty queues

        yield count


def memory_mb() -> float | None:
    """Of the broker, whoever else uses it: what Redis says of itself, and what RabbitMQ's process has if it is here."""
    found = redis_server.memory_bytes() if IS_REDIS else machine.rss_bytes_of("beam.smp")
    return None if found is None else found / 2**20


def take_armed() -> list[int]:
    """The ids in all messages of the eta timer that wait for a worker; the messages are gone then."""
    found: list[int] = []
    with app.connection_for_write() as connection:
        queue: Any = delays.publisher.queue(delays.settings.default_queue)(
            connection.default_channel
        )
        queue.declare()
        while (message := queue.get(no_ack=True)) is not None:
            entries = message.decode()[0][0]
            found.extend(entry[0] for entry in entries)
    return found


@contextmanager
def watching() -> Iterator[Callable[[], int] | None]:
    """Counts the messages with tasks that are sent by anybody, seen from the broker; only Redis tells."""
    if not IS_REDIS:
        yield None
        return
    with redis_server.watching(RUN) as count:
        yield count


def queue_name(timer: str) -> str:
    return f"{NAMESPACES[timer]}.{delays.settings.default_queue}"
