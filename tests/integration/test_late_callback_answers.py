"""Bytes that belong to the answer of one callback do not become the answer of the next one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from delaytasks import Done, Retry
from tests.integration.http_callbacks.caller import Caller
from tests.integration.test_callback_answers import REFUSED, TAKEN, raw
from tests.proxy import Exchange, WebServer

LENGTH = b"Content-Length: %d\r\n" % len(TAKEN)


@pytest.fixture
def web() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.close()


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize(
    "headers",
    [
        LENGTH,
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 00%d\r\n" % len(TAKEN),
    ],
    ids=["length", "chunked", "leading zeros"],
)
def test_a_late_body_of_an_answer_without_content_is_not_the_next_answer(
    web: WebServer, status: int, headers: bytes
) -> None:
    late: dict[Any, bytes] = {}

    def without_content(exchange: Exchange) -> None:
        exchange.wfile.write(b"HTTP/1.1 %d Empty\r\n%s\r\n" % (status, headers))
        late[exchange.connection] = TAKEN

    def refuse(exchange: Exchange) -> None:
        exchange.wfile.write(late.pop(exchange.connection, b"") + REFUSED)

    web.answers |= {"/first": without_content, "/next": refuse}
    caller = Caller()
    assert isinstance(caller.post(web.url("/first")), Done if status == 204 else Retry)
    assert caller.post(web.url("/next")) == Retry(None, "HTTP 500")
    assert web.accepted == 2


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("headers", [b"", b"Content-Length: 0\r\n"], ids=["none", "zero"])
def test_a_connection_is_kept_after_an_answer_that_announces_no_body(
    web: WebServer, status: int, headers: bytes
) -> None:
    web.answers["/empty"] = raw(b"HTTP/1.1 %d Empty\r\n%s\r\n" % (status, headers))
    caller = Caller()
    for _ in range(3):
        caller.post(web.url("/empty"))
    assert caller.post(web.url("/taken")) == Done()
    assert web.accepted == 1
