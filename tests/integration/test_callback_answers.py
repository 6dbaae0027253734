"""Each HTTP callback gets the answer to its own request.

Bytes that the receivers of earlier callbacks wrote to a kept connection do not change it.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from delaytasks import Done, Retry
from delaytasks.webhooks.http_callbacks import MAX_INTERIM_RESPONSES
from tests.integration.http_callbacks.caller import Caller
from tests.proxy import Exchange, WebServer, answer
from tests.services import self_signed
from tests.waiting import wait_until

REFUSED = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"
TAKEN = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
def caller() -> Caller:
    return Caller()


def raw(*parts: bytes) -> Callable[[Exchange], None]:
    """Return a handler that writes each of `parts` unchanged and in a packet of its own."""

    def write(exchange: Exchange) -> None:
        for part in parts:
            exchange.wfile.write(part)
            exchange.wfile.flush()

    return write


def interim(status: int) -> bytes:
    return f"HTTP/1.1 {status} Wait\r\nLink: </style.css>; rel=preload\r\n\r\n".encode()


@pytest.mark.parametrize("status", [100, 102, 103, 199])
@pytest.mark.parametrize("joined", [True, False], ids=["one packet", "two packets"])
def test_an_interim_answer_is_not_the_final_one(
    web: WebServer, caller: Caller, status: int, joined: bool
) -> None:
    parts = [interim(status), interim(103), REFUSED]
    web.answers["/refused"] = raw(b"".join(parts)) if joined else raw(*parts)
    for _ in range(10):
        assert caller.post(web.url("/refused")) == Retry(None, "HTTP 500")
        assert caller.post(web.url("/taken")) == Done()
    assert web.accepted == 1, "the connection is kept"


def test_a_final_answer_that_comes_long_after_its_interim_answer_is_not_the_next_callbacks(
    web: WebServer,
) -> None:
    caller, go_on = Caller(total_s=10, read_s=10), threading.Event()

    def write(exchange: Exchange) -> None:
        exchange.wfile.write(interim(103))
        go_on.wait(10)
        exchange.wfile.write(REFUSED)

    web.answers["/slow"] = write
    outcomes: list[object] = []
    first = threading.Thread(target=lambda: outcomes.append(caller.post(web.url("/slow"))))
    first.start()
    wait_until(lambda: web.received, 10, "the callback at the slow receiver")
    go_on.set()
    first.join(10)
    assert outcomes == [Retry(None, "HTTP 500")]
    assert caller.post(web.url("/taken")) == Done()


@pytest.mark.parametrize("status", [100, 103])
def test_interim_answers_are_bounded_in_number(web: WebServer, caller: Caller, status: int) -> None:
    web.answers["/few"] = raw(interim(status) * MAX_INTERIM_RESPONSES, TAKEN)
    assert caller.post(web.url("/few")) == Done()
    web.answers["/many"] = raw(interim(status) * (MAX_INTERIM_RESPONSES + 1), TAKEN)
    outcome = caller.post(web.url("/many"))
    assert isinstance(outcome, Retry)
    assert f"more than {MAX_INTERIM_RESPONSES} interim responses" in outcome.reason
    assert caller.post(web.url("/taken")) == Done()


def test_a_switch_of_protocols_fails_and_closes_the_connection(
    web: WebServer, caller: Caller
) -> None:
    web.answers["/switch"] = raw(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"
    )
    assert caller.post(web.url("/switch")) == Retry(None, "HTTP 101")
    assert caller.post(web.url("/taken")) == Done()
    assert web.accepted == 2


#: After these answers there are unread bytes, or a receiver and a proxy can disagree about where
#: the answer ends.
LEFT_OVER = {
    "a second answer": TAKEN + REFUSED,
    "half a second answer": TAKEN + b"HTTP/1.1 500 ",
    "a body after its length": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok" + REFUSED,
    "a body without content": b"HTTP/1.1 204 No Content\r\n\r\n" + REFUSED,
    "bytes after the last chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nok\r\n0\r\n\r\n" + REFUSED,
    "an odd length": b"HTTP/1.1 200 OK\r\nContent-Length: +0\r\n\r\n" + REFUSED,
    "chunks with a length": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"
        + REFUSED
    ),
    "an unknown coding with a length": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\nContent-Length: 0\r\n\r\n"
        + REFUSED
    ),
}


@pytest.mark.parametrize("name", LEFT_OVER)
def test_a_connection_with_unread_bytes_is_not_used_again(
    web: WebServer, caller: Caller, name: str
) -> None:
    web.answers["/more"] = raw(LEFT_OVER[name])
    assert caller.post(web.url("/more")) == Done()
    assert caller.post(web.url("/taken")) == Done()
    assert web.accepted == 2


def test_the_connection_of_an_answer_with_an_ambiguous_length_is_closed(
    web: WebServer, caller: Caller
) -> None:
    """The connection is closed because a proxy may see another end of the answer."""
    for name, head in {
        "coded": b"Transfer-Encoding: gzip, chunked\r\nContent-Length: 0",
        "both": b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        "twice": b"Content-Length: 0\r\nContent-Length: 0",
        "odd": b"Content-Length: 0_0",
    }.items():
        accepted = web.accepted
        end = b"0\r\n\r\n" if name == "both" else b""
        web.answers["/odd"] = raw(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n" + end)
        for _ in range(2):
            assert caller.post(web.url("/odd")) == Done(), name
        assert web.accepted >= accepted + 1, name
        caller.post(web.url("/taken"))


def test_bytes_that_arrive_while_a_connection_is_idle_are_not_an_answer(
    web: WebServer, caller: Caller
) -> None:
    go_on, written = threading.Event(), threading.Event()

    def write(exchange: Exchange) -> None:
        exchange.wfile.write(TAKEN)
        go_on.wait(10)
        exchange.wfile.write(REFUSED)
        written.set()

    web.answers["/later"] = write
    assert caller.post(web.url("/later")) == Done()
    go_on.set()
    assert written.wait(10)
    assert caller.post(web.url("/taken")) == Done()
    assert web.accepted == 2


@pytest.mark.parametrize("joined", [True, False], ids=["one record", "two records"])
def test_bytes_left_over_inside_tls_are_not_the_next_answer(tmp_path: Path, joined: bool) -> None:
    made = self_signed(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.file, made.key)
    web, written = WebServer(context), threading.Event()

    def write(exchange: Exchange) -> None:
        # The answer is longer than the reader's buffer. The rest stays in the TLS layer, where the
        # socket does not report unread bytes.
        for part in [TAKEN + b" " * 12_000] if joined else [TAKEN, b" " * 12_000]:
            exchange.wfile.write(part)
        written.set()

    web.answers["/more"] = write
    try:
        caller = Caller(ca_file=str(made.file))
        assert caller.post(web.url("/more", scheme="https")) == Done()
        assert written.wait(10)
        assert caller.post(web.url("/taken", scheme="https")) == Done()
        assert web.accepted == 2
    finally:
        web.close()


def test_a_connection_is_kept_after_every_valid_answer(web: WebServer, caller: Caller) -> None:
    web.answers |= {
        "/length": answer(500, b"x" * 9000),
        "/none": raw(b"HTTP/1.1 204 No Content\r\n\r\n"),
        "/chunks": raw(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
        ),
    }
    for _ in range(5):
        for path in ["/length", "/none", "/chunks", "/"]:
            caller.post(web.url(path))
    assert web.accepted == 1


def test_hosts_that_share_an_address_do_not_share_a_connection(
    web: WebServer, caller: Caller
) -> None:
    for host in ["one.example", "two.example", "one.example"]:
        assert caller.post(web.url("/", host)) == Done()
    assert web.accepted == 2
