"""The proxy of the tests breaks only the connections that a test selects."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.proxy import Proxy


@pytest.fixture
def may_commit() -> threading.Event:
    return threading.Event()


@pytest.fixture
def proxy(may_commit: threading.Event) -> Iterator[Proxy]:
    """Yield a proxy of a server that repeats each message.

    The server answers a COMMIT only after `may_commit` is set.
    """
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1000):
                if data == b"COMMIT":
                    may_commit.wait(10)
                connection.sendall(data * 2)

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    made = Proxy("127.0.0.1", server.getsockname()[1])
    yield made
    made.close()
    server.shutdown(socket.SHUT_RDWR)
    server.close()


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), timeout=10)


def ask(connection: socket.socket, words: bytes) -> bytes:
    connection.sendall(words)
    return connection.recv(1000)


def is_broken_by(connection: socket.socket, words: bytes) -> bool:
    try:
        return ask(connection, words) == b""
    except ConnectionError:
        return True


def test_a_cut_answer_is_that_of_the_connection_that_asked(
    proxy: Proxy, may_commit: threading.Event
) -> None:
    with connect(proxy) as one, connect(proxy) as other:
        proxy.cut_answer(b"COMMIT")
        one.sendall(b"COMMIT")
        assert ask(other, b"b") == b"bb", "nobody's business"
        assert proxy.cut == 0
        may_commit.set()
        assert is_broken_by(one, b"")
        assert ask(other, b"COMMIT") == b"COMMITCOMMIT", "once"
    assert proxy.cut == 1


def test_a_cut_request_is_not_heard_and_happens_once(
    proxy: Proxy, may_commit: threading.Event
) -> None:
    may_commit.set()
    with connect(proxy) as one, connect(proxy) as other:
        proxy.cut_request(b"COMMIT")
        assert is_broken_by(one, b"COMMIT")
        assert ask(other, b"COMMIT") == b"COMMITCOMMIT"
    assert proxy.cut == 1
