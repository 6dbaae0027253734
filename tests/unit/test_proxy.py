"""The proxy of the tests breaks only the connections that a test selects, delays each piece of data
by the same time, and counts round trips.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.proxy import Proxy


@pytest.fixture
def may_commit() -> threading.Event:
    return threading.Event()


@pytest.fixture
def proxy(may_commit: threading.Event) -> Iterator[Proxy]:
    """Yield a proxy of a server that repeats each message.

    The server answers a COMMIT only after `may_commit` is set, and "first" only after the next
    message has arrived.
    """
    server = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1000):
                if data == b"COMMIT":
                    may_commit.wait(10)
                elif data == b"first":
                    connection.recv(1, socket.MSG_PEEK)
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


def test_cut_answer_cuts_the_answer_of_the_connection_that_sent_the_request(
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


def test_a_cut_request_does_not_reach_the_server_and_happens_once(
    proxy: Proxy, may_commit: threading.Event
) -> None:
    may_commit.set()
    with connect(proxy) as one, connect(proxy) as other:
        proxy.cut_request(b"COMMIT")
        assert is_broken_by(one, b"COMMIT")
        assert ask(other, b"COMMIT") == b"COMMITCOMMIT"
    assert proxy.cut == 1


def test_each_request_after_an_answer_is_a_round_trip(proxy: Proxy) -> None:
    with connect(proxy) as one, connect(proxy) as other:
        for number in range(1, 4):
            ask(one, b"b")
            assert proxy.round_trips == number
        ask(other, b"b")
        assert proxy.round_trips == 4


def test_requests_that_do_not_wait_for_an_answer_are_one_round_trip(proxy: Proxy) -> None:
    with connect(proxy) as one:
        one.sendall(b"first")
        threading.Event().wait(0.05)
        one.sendall(b"b")
        received = b""
        while len(received) < 2 * len(b"firstb"):
            received += one.recv(1000)
        assert proxy.round_trips == 1
        ask(one, b"b")
        assert proxy.round_trips == 2


def test_a_delayed_request_does_not_delay_the_next_one(proxy: Proxy) -> None:
    with connect(proxy) as one:
        ask(one, b"b")
        proxy.delay_s = 0.5
        began = time.monotonic()
        one.sendall(b"1")
        threading.Event().wait(0.05)
        one.sendall(b"2")
        received = b""
        while len(received) < 4:
            received += one.recv(1000)
        took_s = time.monotonic() - began
    assert received == b"1122"
    assert 1.05 <= took_s < 1.4, "each request takes one round trip of 1 s"
