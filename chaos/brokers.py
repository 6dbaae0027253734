"""The brokers of a run: they can be emptied, disconnected, killed and restarted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from tests.services import RabbitServer, RedisServer


class Broker(Protocol):
    name: str
    url: str

    def start(self, is_empty: bool = False) -> None: ...

    def crash(self) -> None: ...

    def stop(self) -> None: ...

    def empty(self, queues: Iterable[str]) -> None: ...

    def close_connections(self) -> None: ...


class PrivateRedis(RedisServer):
    """A Redis server without persistence: each start is with an empty memory."""

    def start(self, is_empty: bool = True) -> None:
        super().start()

    def crash(self) -> None:
        self.stop()

    def empty(self, queues: Iterable[str]) -> None:
        self.client().flushall()

    def close_connections(self) -> None:
        _close_connections(self.client())


def _close_connections(client: Any) -> None:
    for kind in ("normal", "pubsub"):
        client.client_kill_filter(_type=kind, skipme=True)


def start_broker(kind: str, folder: Path) -> Broker:
    broker_folder = folder / kind
    broker_folder.mkdir()
    broker_types: dict[str, type[Any]] = {"redis": PrivateRedis, "rabbitmq": RabbitServer}
    broker: Broker = broker_types[kind](broker_folder)
    return broker
