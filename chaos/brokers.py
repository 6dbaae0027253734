"""The brokers of a run: they can be emptied, disconnected, killed and restarted."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from redis import Redis

from delaytasks.embedded.broker import begin, broker_of, leave
from delaytasks.embedded.server import answers
from tests.rabbitmq_server import RabbitServer
from tests.redis_server import RedisServer
from tests.services import MissingServiceError
from tests.waiting import wait_until


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


class EmbeddedBroker:
    """The Redis that `delaytasks up` starts: it listens on a socket and keeps its data on disk."""

    name = "the embedded Redis"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = begin(folder)
        if self._server is None:
            raise MissingServiceError("there is no redis-server for the embedded broker")
        self.url = broker_of(folder).url
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self, is_empty: bool = False) -> None:
        assert self._server is not None
        if is_empty:
            shutil.rmtree(self._folder / "redis", ignore_errors=True)
            (self._folder / "redis").mkdir(mode=0o700)
        with (self._folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._server.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        socket = self._server.socket
        wait_until(lambda: answers(socket), 15, "the embedded Redis")

    def crash(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        self.crash()
        assert self._server is not None
        self._server.socket.unlink(missing_ok=True)
        leave(self._folder)

    def empty(self, queues: Iterable[str]) -> None:
        self._client().flushall()

    def close_connections(self) -> None:
        _close_connections(self._client())

    def _client(self) -> Redis:
        assert self._server is not None
        return Redis(unix_socket_path=str(self._server.socket))


def _close_connections(client: Any) -> None:
    for kind in ("normal", "pubsub"):
        client.client_kill_filter(_type=kind, skipme=True)


def start_broker(kind: str, folder: Path) -> Broker:
    broker_folder = folder / kind
    broker_folder.mkdir()
    broker_types: dict[str, type[Any]] = {
        "redis": PrivateRedis,
        "rabbitmq": RabbitServer,
        "embedded": EmbeddedBroker,
    }
    broker: Broker = broker_types[kind](broker_folder)
    return broker
