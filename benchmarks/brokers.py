"""The broker of a run. The queues of the benchmarks are deleted afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kombu.exceptions import OperationalError

from benchmarks import machine, redis_server
from benchmarks.ours import app, delays
from benchmarks.settings import BARE_QUEUE, NAMESPACES, broker_url, redis_url
from benchmarks.waiting import BenchError
from delaytasks.broker.arming import RUN

IS_REDIS = redis_url() == broker_url()


def check() -> None:
    with app.connection_for_write() as connection:
        try:
            connection.ensure_connection(max_retries=1, interval_start=0)
        except OperationalError as error:
            raise BenchError(
                f"the broker {connection.as_uri()} does not answer ({error}): set "
                "DELAYTASKS_BENCH_BROKER_URL"
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
    """Return the number of messages that no worker has received."""
    with counting(queue) as count:
        return count()


@contextmanager
def counting(queue: str) -> Iterator[Callable[[], int]]:
    """Yield the function `waiting` on one permanent connection."""
    with app.connection_for_write() as connection:

        def count() -> int:
            try:
                return int(
                    connection.default_channel.queue_declare(queue, passive=True).message_count
                )
            except connection.channel_errors:
                return 0  # Redis deletes empty queues

        yield count


def memory_mb() -> float | None:
    """Return the memory of the broker, including the data of its other users.

    RabbitMQ reports a value only if its process is on this machine.
    """
    found = redis_server.memory_bytes() if IS_REDIS else machine.rss_bytes_of("beam.smp")
    return None if found is None else found / 2**20


@contextmanager
def watching() -> Iterator[Callable[[], int] | None]:
    """Count the task messages of all clients, as the broker reports them. Only Redis does."""
    if not IS_REDIS:
        yield None
        return
    with redis_server.watching(RUN) as count:
        yield count


def queue_name(timer: str) -> str:
    return f"{NAMESPACES[timer]}.{delays.settings.default_queue}"
