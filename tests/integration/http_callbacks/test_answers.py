"""Answers and broken connections decide when a callback is sent again."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from functools import partial
from typing import Any

import pytest

from delaytasks import Done, Fail, Retry
from delaytasks.core.celery_calls import Callback
from delaytasks.webhooks.http_callbacks import retry_after_s
from tests.integration.http_callbacks.caller import HEAD, PATIENCE_S, Caller, listener, task
from tests.proxy import WebServer, answer, drip, hang, pour, reset
from tests.services import free_port


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_success_is_any_2xx(web: WebServer, caller: Caller, status: int) -> None:
    web.answers["/"] = answer(status)
    assert caller.post(web.url()) == Done()


@pytest.mark.parametrize("status", [400, 401, 404, 408, 418, 500, 502, 503, 599])
def test_other_statuses_are_retried_and_the_error_quotes_the_answer(
    web: WebServer, caller: Caller, status: int
) -> None:
    web.answers["/"] = answer(status, b"no\r\n\x1b[31m such \x00 order" + b"!" * 5000)
    outcome = caller.post(web.url())
    assert isinstance(outcome, Retry)
    assert outcome.after is None
    head, quoted = outcome.reason.split("\n")
    assert head == f"HTTP {status}"
    assert quoted.startswith(r"no\r\n\x1b[31m such \x00 order!!!")
    assert len(quoted) < 600


def test_status_410_fails_the_callback(web: WebServer, caller: Caller) -> None:
    web.answers["/"] = answer(410, b"gone")
    assert caller.post(web.url()) == Fail("HTTP 410\ngone")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_failures_and_not_followed(
    web: WebServer, caller: Caller, status: int
) -> None:
    web.answers["/"] = answer(status, b"", Location=web.url("/other"))
    outcome = caller.post(web.url())
    assert isinstance(outcome, Retry)
    assert outcome.reason == f"HTTP {status}, to {web.url('/other')}: redirects are not followed"
    assert [request.path for request in web.received] == ["/"]


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_makes_a_wait_longer_up_to_a_cap_and_never_shorter(
    web: WebServer, caller: Caller, status: int
) -> None:
    def after(value: str, attempt: int = 1) -> Any:
        web.answers["/"] = answer(status, b"", Retry_After=value)
        return caller.post(web.url(), attempt=attempt).after

    assert after("120") == 120
    assert after("5") is None, "the first rung is longer"
    assert after("120", attempt=2) is None, "and so is the second"
    assert after("999999999") == 86400
    soon = format_datetime(datetime.now(timezone.utc) + timedelta(hours=1), usegmt=True)
    assert 3500 < after(soon) <= 3600
    assert after("Thu, 01 Jan 1970 00:00:00 GMT") is None
    assert after("soon") is None
    assert after("120", attempt=10) is None, "no rung is left"


def test_retry_after_applies_to_a_task_with_its_own_retry_schedule(
    web: WebServer, caller: Caller
) -> None:
    web.answers["/"] = answer(503, b"", Retry_After="20")
    own = task(headers_json='{"retry": {"retry_delays_s": [1], "jitter": 0}}')
    assert caller.http(Callback(web.url()), own) == Retry(20, "HTTP 503")


def test_retry_after_of_other_statuses_is_ignored(web: WebServer, caller: Caller) -> None:
    web.answers["/"] = answer(500, b"", Retry_After="120")
    assert caller.post(web.url()).after is None


def test_dates_of_retry_after_are_read_in_all_their_forms() -> None:
    now = datetime(2030, 1, 1, 12, 0, tzinfo=timezone.utc)
    for text in (
        "Tue, 01 Jan 2030 12:01:00 GMT",
        "Tue, 01 Jan 2030 13:01:00 +0100",
        "Tue, 01 Jan 2030 12:01:00 -0000",
    ):
        assert retry_after_s(text, now) == 60, text
    for text in ("", "-1", "1.5", "1e3", "x", "Tue, 99 Jan 2030 12:01:00 GMT", "9" * 400):
        assert retry_after_s(text, now) == 0, text


# -- broken connections and answers --------------------------------------------------------------


TROUBLE = {
    "silence": hang,
    "a reset": reset,
    "a drip of headers": drip(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x"),
    "a drip of header lines": drip(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "a drip of statuses": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "an endless header": partial(pour, b"HTTP/1.1 200 OK\r\nX: "),
    "no HTTP": lambda exchange: exchange.wfile.write(b"SSH-2.0-x\r\n\r\n") and None,
}


@pytest.mark.slow
@pytest.mark.parametrize("write", TROUBLE.values(), ids=TROUBLE.keys())
def test_a_network_error_is_recorded_and_retried_in_bounded_time(
    web: WebServer, caller: Caller, write: Any
) -> None:
    web.answers["/hook"] = write
    outcome = caller.post(web.url("/hook?token=hunter2"))
    assert isinstance(outcome, Retry)
    assert outcome.reason.startswith("network: ")
    assert f"at 127.0.0.1:{web.port} (127.0.0.1): " in outcome.reason
    assert "hunter2" not in outcome.reason
    web.answers.clear()
    assert caller.post(web.url()) == Done(), "and no other callback suffers"


BODIES = {
    "a drip": drip(HEAD, b"x"),
    "a drip of chunks": drip(
        b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"
    ),
    "a drip of a chunk's size": drip(
        b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"
    ),
    "an endless one": partial(pour, b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n"),
    "an endless one of chunks": drip(
        b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n", b"x" * 65536
    ),
    "silence": lambda exchange: exchange.wfile.write(HEAD) and hang(exchange),
    "a reset": lambda exchange: exchange.wfile.write(HEAD) and reset(exchange),
}


@pytest.mark.slow
@pytest.mark.parametrize("status", [b"500", b"200"])
@pytest.mark.parametrize("write", BODIES.values(), ids=BODIES.keys())
def test_the_status_decides_even_if_the_body_is_broken(
    web: WebServer, caller: Caller, write: Any, status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.answers["/"] = lambda exchange: write(_Saying(exchange, status))
    outcome = caller.post(web.url())
    assert outcome == Done() if status == b"200" else outcome.reason.startswith("HTTP 500")
    web.answers.clear()
    assert caller.post(web.url()) == Done()
    assert web.accepted == 2, "its connection is not used again"


class _Saying:
    """Replace the status 500 in the bytes that an exchange writes."""

    def __init__(self, exchange: Any, status: bytes) -> None:
        self._exchange = exchange
        self._status = status
        self.wfile = self

    def write(self, data: bytes) -> int:
        written: int = self._exchange.wfile.write(data.replace(b" 500 ", b" %s " % self._status))
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)


def test_an_endless_answer_is_read_to_the_cap_only(web: WebServer) -> None:
    sent = 0

    def count(exchange: Any) -> None:
        nonlocal sent
        exchange.wfile.write(b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n")
        while not web.closing.is_set():
            sent += exchange.wfile.write(b"x" * 4096)

    web.answers["/"] = count
    caller = Caller(total_s=PATIENCE_S, read_s=PATIENCE_S)
    assert caller.post(web.url()).reason.startswith("HTTP 500")
    assert sent < 50_000_000, "what the sockets hold between us"


def test_a_redirect_with_an_endless_body_is_not_read_to_its_end(web: WebServer) -> None:
    web.answers["/"] = partial(
        pour, b"HTTP/1.1 302 Found\r\nLocation: /x\r\nConnection: close\r\n\r\n"
    )
    assert Caller(total_s=600, read_s=600).post(web.url()).reason.startswith("HTTP 302, to /x")


def test_a_receiver_that_does_not_read_is_given_up_in_time() -> None:
    with listener() as port:
        outcome = Caller().post(f"http://127.0.0.1:{port}/", "x" * 50_000_000)
    assert outcome.reason.startswith("network: ")


def test_a_refused_connection_is_a_network_error(caller: Caller) -> None:
    outcome = caller.post(f"http://127.0.0.1:{free_port()}/")
    assert "network: ConnectionError at " in outcome.reason
    assert "refused" in outcome.reason


def test_a_name_that_cannot_be_resolved_is_a_network_error() -> None:
    def unknown(host: str) -> list[str]:
        raise OSError("Name or service not known")

    outcome = Caller(unknown).post("https://partner.example/")
    assert outcome.reason == "network: OSError at partner.example: Name or service not known"
    over = threading.Event()
    try:
        outcome = Caller(lambda host: (over.wait() and []) or [], connect_s=0.2).post(
            "https://partner.example/"
        )
        assert outcome.reason == "network: TimeoutError at partner.example: no answer within 0.2 s"
    finally:
        over.set()
