"""The broker of a run: only its own things may lie there, and they are gone afterwards."""

from __future__ import annotations

from typing import Any

from kombu.exceptions import OperationalError

from benchmarks.ours import app, delays
from benchmarks.waiting import BenchError
from benchmarks.where import BARE_QUEUE, NAMESPACE

#: What Celery and kombu themselves keep in a Redis database.
_KEYS = (BARE_QUEUE, f"{NAMESPACE}.", "bench_idle", "_kombu.binding", "unacked", "celery", "reply.celery")


def check() -> None:
    """A run measures nothing beside strangers, and must not delete what is theirs."""
    with app.connection_for_write() as connection:
        try:
            connection.ensure_connection(max_retries=1, interval_start=0)
        except OperationalError as error:
            raise BenchError(
                f"the broker {connection.as_uri()} does not answer ({error}): set DELAYTASKS_BENCH_BROKER_URL"
            ) from error
        if connection.transport.driver_type != "redis":
            return
        strange = [key for key in _redis_keys(connection) if not _is_ours(key)]
    if strange:
        raise BenchError(
            f"the broker {connection.as_uri()} holds other things ({', '.join(strange[:3])}, …): "
            "set DELAYTASKS_BENCH_BROKER_URL to a Redis database of its own"
        )


def clear() -> None:
    with app.connection_for_write() as connection:
        if connection.transport.driver_type == "redis":
            keys = [key for key in _redis_keys(connection) if _is_ours(key)]
            if keys:
                connection.default_channel.client.delete(*keys)
            return
        for name in (BARE_QUEUE, "bench_idle", f"{NAMESPACE}.{delays.settings.default_queue}"):
            for delete in (connection.default_channel.queue_delete, connection.default_channel.exchange_delete):
                try:
                    delete(name)
                except connection.channel_errors:
                    connection.default_channel.close()


def describe() -> str:
    with app.connection_for_write() as connection:
        if connection.transport.driver_type == "redis":
            return f"Redis {connection.default_channel.client.info('server')['redis_version']}"
        connection.ensure_connection(max_retries=1)
        properties = connection.connection.server_properties
        return f"{properties.get('product', '?')} {properties.get('version', '?')}"


def _redis_keys(connection: Any) -> list[str]:
    keys = connection.default_channel.client.scan_iter(count=1000)
    return [key.decode() if isinstance(key, bytes) else key for key in keys]


def _is_ours(key: str) -> bool:
    # Replies of `ping` wait in a queue named by a random id.
    return key.startswith(_KEYS) or key.endswith(("reply.celery.pidbox", ".pidbox"))
