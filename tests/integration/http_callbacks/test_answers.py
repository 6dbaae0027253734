"""Answers and broken connections decide when a callback is sent again."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from delaytasks import Done, Fail, Retry
from delaytasks.callbacks.sending import MAX_INTERIM_RESPONSES, Callback, retry_after_s
from tests.integration.http_callbacks.conftest import HEAD, Caller, listener, task
from tests.proxy import Exchange, WebServer, answer, drip, hang, pour, reset
from tests.services import free_port, self_signed

ENDS = {status: Done() for status in (200, 201, 202, 204, 299)} | {410: Fail("HTTP 410\ngone")}


@pytest.mark.parametrize("status", ENDS)
def test_success_is_any_2xx_and_410_fails(web: WebServer, caller: Caller, status: int) -> None:
    web.answers["/"] = answer(status, b"gone")
    assert caller.post(web.url()) == ENDS[status]


@pytest.mark.parametrize("status", [400, 401, 404, 408, 418, 500, 502, 503, 599])
def test_other_statuses_are_retried_and_quoted(web: WebServer, caller: Caller, status: int) -> None:
    web.answers["/"] = answer(status, b"no\r\n\x1b[31m such \x00 order" + b"!" * 5000)
    outcome = caller.post(web.url())
    assert isinstance(outcome, Retry)
    assert outcome.after is None
    head, quoted = outcome.reason.split("\n")
    assert head == f"HTTP {status}"
    assert quoted.startswith(r"no\r\n\x1b[31m such \x00 order!!!")
    assert len(quoted) < 600


@pytest.mark.parametrize("status", [301, 307])
def test_redirects_are_failures_never_followed(web: WebServer, caller: Caller, status: int) -> None:
    web.answers["/"] = answer(status, b"", Location=web.url("/other"))
    reason = f"HTTP {status}, to {web.url('/other')}: redirects are not followed"
    assert caller.post(web.url()) == Retry(None, reason)
    assert [request.path for request in web.received] == ["/"]


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_lengthens_waits_to_a_cap(web: WebServer, caller: Caller, status: int) -> None:
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


def test_retry_after_is_for_own_schedules_and_not_for_500(web: WebServer, caller: Caller) -> None:
    web.answers["/"] = answer(503, b"", Retry_After="20")
    own = task(headers_json='{"retry": {"retry_delays_s": [1], "variation": 0}}')
    assert caller.http(Callback(web.url()), own) == Retry(20, "HTTP 503")
    web.answers["/"] = answer(500, b"", Retry_After="120")
    assert caller.post(web.url()).after is None


def test_dates_of_retry_after_are_read_in_all_their_forms() -> None:
    now = datetime(2030, 1, 1, 12, 0, tzinfo=timezone.utc)
    for time in ("12:01:00 GMT", "13:01:00 +0100", "12:01:00 -0000"):
        assert retry_after_s(f"Tue, 01 Jan 2030 {time}", now) == 60, time
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


CLOSING = b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n"


def broken_bodies(status: int) -> dict[str, Any]:
    """Return answers of this status, each with a body that does not arrive as announced."""
    line = b"HTTP/1.1 %d No\r\n" % status
    head = line + b"Content-Length: 1000000\r\n\r\n"
    chunked = line + b"Transfer-Encoding: chunked\r\n\r\n"
    return {
        "a drip": drip(head, b"x"),
        "a drip of chunks": drip(chunked, b"1\r\nx\r\n"),
        "a drip of a chunk's size": drip(chunked, b"0"),
        "an endless one": partial(pour, line + b"Connection: close\r\n\r\n"),
        "a chunk of a negative size": partial(pour, chunked + b"-5\r\n"),
        "a chunk without an end": partial(pour, chunked + b"-1\r\n"),
        "an endless one of chunks": drip(chunked + b"fffffff\r\n", b"x" * 65536),
        "silence": lambda exchange: exchange.wfile.write(head) and hang(exchange),
        "a reset": lambda exchange: exchange.wfile.write(head) and reset(exchange),
    }


@pytest.mark.slow
@pytest.mark.parametrize("status", [500, 200])
@pytest.mark.parametrize("body", broken_bodies(200))
def test_the_status_decides_even_if_the_body_is_broken(
    web: WebServer, caller: Caller, body: str, status: int
) -> None:
    web.answers["/"] = broken_bodies(status)[body]
    outcome = caller.post(web.url())
    assert outcome == Done() if status == 200 else outcome.reason.startswith("HTTP 500")
    web.answers.clear()
    assert caller.post(web.url()) == Done()
    assert web.accepted == 2, "its connection is not used again"


@pytest.mark.parametrize("head", [CLOSING, CLOSING.replace(b"500 No", b"302 No\r\nLocation: /x")])
def test_an_endless_answer_is_read_to_the_cap(web: WebServer, head: bytes) -> None:
    web.answers["/"] = partial(pour, head)
    outcome = Caller(timeout=600, read_s=600).post(web.url())
    assert outcome.reason.startswith(f"HTTP {head.split()[1].decode()}")


def test_receivers_that_do_not_read_or_do_refuse_are_network_errors(caller: Caller) -> None:
    with listener() as port:
        outcome = caller.post(f"http://127.0.0.1:{port}/", "x" * 50_000_000)
    assert outcome.reason.startswith("network: "), "it is given up in time"
    outcome = caller.post(f"http://127.0.0.1:{free_port()}/")
    assert "network: ConnectionRefusedError at " in outcome.reason
    assert "refused" in outcome.reason


def test_a_name_that_cannot_be_resolved_is_a_network_error() -> None:
    def unknown(host: str) -> list[str]:
        raise OSError("Name or service not known")

    outcome = Caller(unknown).post("https://partner.example/")
    assert outcome.reason == "network: OSError at partner.example: Name or service not known"
    over = threading.Event()
    silent = Caller(lambda host: [str(over.wait())], connect_s=0.2)
    outcome = silent.post("https://partner.example/")
    over.set()
    assert outcome.reason == "network: TimeoutError at partner.example: no answer within 0.2 s"


# -- Interim answers ------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("status", [100, 103, 199])
@pytest.mark.parametrize("joined", [True, False], ids=["one packet", "several packets"])
def test_some_interim_answers_are_skipped(
    web: WebServer, caller: Caller, status: int, joined: bool
) -> None:
    interim = b"HTTP/1.1 %d Wait\r\nLink: </style.css>; rel=preload\r\n\r\n" % status

    def write(number: int, exchange: Exchange) -> None:
        parts = [interim] * number + [CLOSING]
        for part in [b"".join(parts)] if joined else parts:
            exchange.wfile.write(part)
            exchange.wfile.flush()

    for most, reason in ((0, "HTTP 500"), (1, f"more than {MAX_INTERIM_RESPONSES} interim")):
        web.answers["/"] = partial(write, MAX_INTERIM_RESPONSES + most)
        outcome = caller.post(web.url())
        assert isinstance(outcome, Retry)
        assert reason in outcome.reason


def test_a_switch_of_protocols_fails(web: WebServer, caller: Caller) -> None:
    web.answers["/"] = answer(101, Upgrade="h2c")
    assert caller.post(web.url()) == Retry(None, "HTTP 101")


# -- Callbacks by TLS -----------------------------------------------------------------------------


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[tuple[WebServer, Caller, list[str]]]:
    """A server with a certificate for one name, a caller that trusts it, and the names it asks."""
    certificate = self_signed(tmp_path, "DNS:partner.example")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.file, certificate.key)
    asked: list[str] = []
    context.sni_callback = lambda sock, name, _: asked.append(name)
    server = WebServer(context)
    yield server, Caller(ca_file=str(certificate.file)), asked
    server.close()


def test_a_pinned_address_is_asked_for_the_certificate_of_the_hosts_name(secure: Any) -> None:
    server, caller, asked = secure
    url = server.url("/", "partner.example", "https")
    assert caller.post(url) == Done()
    assert asked == ["partner.example"]
    unknown = "network: SSLCertVerificationError at "
    for other, host in ((Caller(), "partner.example"), (caller, "other.example")):
        reason = other.post(server.url("/", host, "https")).reason
        assert reason.startswith(f"{unknown}{host}:")
        assert "certificate" in reason
    assert len(server.received) == 1


def test_tls_errors_are_bounded_in_time_as_well(secure: Any) -> None:
    server, caller, _ = secure
    server.answers = {"/head": drip(OK + b"X: ", b"x"), "/body": drip(HEAD, b"x"), "/hang": hang}
    for path, reason in (("/head", "network: "), ("/hang", "network: "), ("/body", "HTTP 500")):
        outcome = caller.post(server.url(path, "partner.example", "https"))
        assert outcome.reason.startswith(reason)
    with listener() as port:
        outcome = caller.post(f"https://partner.example:{port}/")
    assert outcome.reason.startswith("network: ")
