"""Test HTTP callbacks to real servers: answers, errors, and the outcomes of their tasks."""

from __future__ import annotations

import base64
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook

from delaytasks import DelayTask, DelayTasks, Done, Fail, Retry, RetrySchedule, Status
from delaytasks.core.bounded_calls import within
from delaytasks.core.callbacks import CALLBACK, Callback
from delaytasks.core.clock import Clock
from delaytasks.core.errors import (
    BodyNotJSONError,
    BodyRefusedError,
    ForbiddenURLError,
    InvalidHeaderError,
)
from delaytasks.core.settings import load_settings
from delaytasks.storage import migrations
from delaytasks.webhooks import addresses
from delaytasks.webhooks.addresses import Guard
from delaytasks.webhooks.http import HttpCallbacks, retry_after_s
from delaytasks.wiring import wiring_of
from tests.recording import delays_on, record, run_now
from tests.services import free_port
from tests.webserver import WebServer, answer, drip, hang, pour, reset

SECRETS = ["whsec_" + base64.b64encode(letter * 32).decode() for letter in (b"a", b"b")]
#: Each test ends within this many seconds; the limits under test are much shorter.
PATIENCE_S = 20


class Caller:
    """Send callbacks as a process does, with a name resolution of the test's own."""

    def __init__(self, names: Callable[[str], list[str]] | None = None, **settings: Any) -> None:
        given = {"allow": "127.0.0.1", "connect_s": 2, "read_s": 0.5, "total_s": 1, **settings}
        self.settings = load_settings(
            {}, {}, **{f"callback_{name}": value for name, value in given.items()}
        )
        self.looked_up: list[str] = []

        def resolve(host: str, port: int) -> list[str]:
            self.looked_up.append(host)
            return names(host) if names is not None else ["127.0.0.1"]

        self.http = HttpCallbacks(
            self.settings, Guard(self.settings.callback_allow, resolve), Clock()
        )

    def post(self, url: str, body: Any = None, attempt: int = 1, **more: Any) -> Any:
        """Return the outcome, or raise `TimeoutError` if the callback does not end in time."""
        call = partial(self.http, Callback(url, body, **more), task(attempt))
        return within(PATIENCE_S, call)


def task(attempt: int = 1, **more: Any) -> DelayTask:
    return DelayTask(42, CALLBACK, "{}", datetime.now(timezone.utc), attempts=attempt, **more)


@pytest.fixture
def caller() -> Caller:
    return Caller()


# -- requests -------------------------------------------------------------------------------------


def test_a_callback_is_a_post_of_json_that_the_official_package_verifies(web: WebServer) -> None:
    caller = Caller(callback_secrets=None, secrets=SECRETS) if False else Caller(secrets=SECRETS)
    body = {
        "order": 7,
        "name": "é",
        "big": 2**60,
        "text": "\u2028\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    }
    assert caller.post(web.url("/paid?a=1"), body, headers={"X-Shop": "one"}) == Done()
    [request] = web.received
    assert request.path == "/paid?a=1"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["x-shop"] == "one"
    assert request.headers["host"] == f"127.0.0.1:{web.port}"
    assert request.headers["webhook-id"] == "42"
    for secret in SECRETS:
        assert Webhook(secret).verify(request.body, request.headers) == body


def test_each_attempt_has_the_same_id_and_a_time_of_its_own(web: WebServer) -> None:
    clock = Clock()
    now = [datetime(2030, 1, 1, tzinfo=timezone.utc)]
    clock.now = lambda: now[0]  # type: ignore[method-assign]
    caller = Caller(secrets=SECRETS[0])
    caller.http._clock = clock
    for attempt in (1, 2):
        caller.post(web.url(), attempt=attempt)
        now[0] += timedelta(seconds=15)
    first, second = (request.headers for request in web.received)
    assert first["webhook-id"] == second["webhook-id"]
    assert int(second["webhook-timestamp"]) - int(first["webhook-timestamp"]) == 15
    assert first["webhook-signature"] != second["webhook-signature"]


def test_without_secrets_nothing_is_signed(web: WebServer, caller: Caller) -> None:
    caller.post(web.url())
    assert "webhook-signature" not in web.received[0].headers


def test_connections_are_kept_and_shared_by_threads(web: WebServer, caller: Caller) -> None:
    for _ in range(5):
        assert caller.post(web.url()) == Done()
    web.answers["/no"] = answer(500, b"x" * 5000)
    caller.post(web.url("/no"))
    caller.post(web.url())
    assert web.accepted == 1
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda _: caller.http(Callback(web.url()), task()), range(100)))
    assert outcomes == [Done()] * 100
    assert web.accepted <= 8


def test_a_connection_is_not_shared_with_a_child(web: WebServer, caller: Caller) -> None:
    caller.post(web.url())
    child = os.fork()
    if child == 0:
        os._exit(0 if caller.http(Callback(web.url()), task()) == Done() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert web.accepted == 2
    caller.post(web.url())
    assert web.accepted == 2, "and the parent's is as it was"


def test_cookies_proxies_and_netrc_are_nothing_to_us(
    web: WebServer, caller: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    web.answers["/"] = answer(Set_Cookie="a=1; Path=/")
    assert caller.post(web.url()) == caller.post(web.url()) == Done()
    for request in web.received:
        assert not {"cookie", "authorization"} & request.headers.keys()


# -- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_success_is_any_2xx(web: WebServer, caller: Caller, status: int) -> None:
    web.answers["/"] = answer(status)
    assert caller.post(web.url()) == Done()


@pytest.mark.parametrize("status", [400, 401, 404, 408, 418, 500, 502, 503, 599])
def test_other_statuses_climb_the_ladder_and_quote_the_answer(
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


def test_410_ends_it(web: WebServer, caller: Caller) -> None:
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


def test_retry_after_counts_with_a_tasks_own_ladder(web: WebServer, caller: Caller) -> None:
    web.answers["/"] = answer(503, b"", Retry_After="20")
    own = task(headers_json='{"retry": {"rungs_s": [1], "jitter": 0}}')
    assert caller.http(Callback(web.url()), own) == Retry(20, "HTTP 503")


def test_other_statuses_have_no_say_in_the_wait(web: WebServer, caller: Caller) -> None:
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


# -- broken connections and answers ---------------------------------------------------------------

HEAD = b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\n"
TROUBLE = {
    "silence": hang,
    "a reset": reset,
    "a drip of headers": drip(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x"),
    "a drip of header lines": drip(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "a drip of statuses": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "an endless header": partial(pour, b"HTTP/1.1 200 OK\r\nX: "),
    "no HTTP": lambda exchange: exchange.wfile.write(b"SSH-2.0-x\r\n\r\n") and None,
}


@pytest.mark.parametrize("write", TROUBLE.values(), ids=TROUBLE.keys())
def test_network_trouble_is_recorded_as_such_and_climbs_in_bounded_time(
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


@pytest.mark.parametrize("status", [b"500", b"200"])
@pytest.mark.parametrize("write", BODIES.values(), ids=BODIES.keys())
def test_whatever_befalls_the_body_the_status_counts(
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
    with _listener() as port:
        outcome = Caller().post(f"http://127.0.0.1:{port}/", "x" * 50_000_000)
    assert outcome.reason.startswith("network: ")


def test_nobody_listens(caller: Caller) -> None:
    outcome = caller.post(f"http://127.0.0.1:{free_port()}/")
    assert "network: ConnectionError at " in outcome.reason
    assert "refused" in outcome.reason


def test_a_name_that_is_not_known_or_not_answered_is_network_trouble() -> None:
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


@contextmanager
def _listener() -> Iterator[int]:
    """Yield the port of a server that accepts connections, and neither reads nor writes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


# -- allowed destinations -------------------------------------------------------------------------


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(web: WebServer) -> None:
    caller = Caller(lambda host: ["127.0.0.1"])
    assert caller.post(web.url("/paid", "partner.example")) == Done()
    assert web.received[0].headers["host"] == f"partner.example:{web.port}"
    assert caller.looked_up == ["partner.example"], (
        "the name, which nobody else knows, is looked up once"
    )
    assert caller.post(web.url("/paid", "partner.example")) == Done()
    assert caller.looked_up == ["partner.example"], "and not again in the same moment"


def test_a_name_that_means_something_else_a_moment_later_leads_nowhere(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(addresses, "RESOLVED_FOR_S", 0)
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["169.254.169.254"], ["127.0.0.1", "10.0.0.1"]])
    caller = Caller(lambda host: next(answers))
    url = web.url("/", "partner.example")
    assert caller.post(url) == Done()
    for bad in ("127.0.0.2", "169.254.169.254", "10.0.0.1"):
        outcome = caller.post(url)
        assert isinstance(outcome, Retry)
        assert outcome.reason.startswith("forbidden: callbacks may not go to ")
        assert f"now {bad}" in outcome.reason
    assert len(web.received) == 1, "not even by the connection that is kept"


def test_what_became_forbidden_after_it_was_scheduled_is_not_called(web: WebServer) -> None:
    outcome = Caller(allow="").post(web.url())
    assert outcome.reason.startswith("forbidden: ")
    assert web.received == []


# -- TLS ------------------------------------------------------------------------------------------


class Authority:
    """Issue certificates for the servers of a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = folder / "ca.pem"
        self._key = folder / "ca.key"
        # Since Python 3.13 a default context checks certificates as strictly as RFC 5280, which
        # requires the key usage of a certificate authority.
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        self._run(
            "req",
            "-x509",
            "-subj",
            "/CN=Test CA",
            "-days",
            "2",
            *usage,
            "-keyout",
            self._key,
            "-out",
            self.file,
        )

    def context(self, san: str) -> ssl.SSLContext:
        key, request, certificate, names = (
            self._folder / f"server.{end}" for end in ("key", "csr", "pem", "ext")
        )
        names.write_text(f"subjectAltName={san}\nauthorityKeyIdentifier=keyid\n")
        self._run("req", "-subj", "/CN=server", "-keyout", key, "-out", request)
        signing = (
            "-CA",
            self.file,
            "-CAkey",
            self._key,
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            names,
        )
        self._run("x509", "-req", "-in", request, "-out", certificate, *signing, new_key=False)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context

    @staticmethod
    def _run(command: str, *options: object, new_key: bool = True) -> None:
        made = (
            ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
            if new_key
            else ()
        )
        subprocess.run(
            ["openssl", command, *made, *map(str, options)], check=True, capture_output=True
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


Secure = Callable[[str], WebServer]


@pytest.fixture
def secure(authority: Authority) -> Iterator[Secure]:
    made: list[WebServer] = []

    def start(san: str) -> WebServer:
        context = authority.context(san)
        server = WebServer(context)
        server.asked_for = asked = []  # type: ignore[attr-defined]
        context.sni_callback = lambda sock, name, _: asked.append(name)
        made.append(server)
        return server

    yield start
    for server in made:
        server.close()


def test_a_pinned_address_is_asked_for_the_hosts_certificate_and_checked_by_the_hosts_name(
    secure: Secure, authority: Authority
) -> None:
    server = secure("DNS:partner.example")
    caller = Caller(ca_file=str(authority.file))
    for _ in range(2):
        assert caller.post(server.url("/", "partner.example", "https")) == Done()
    assert server.asked_for == ["partner.example"]  # type: ignore[attr-defined]
    assert server.accepted == 1
    outcome = caller.post(server.url("/", "other.example", "https"))
    assert outcome.reason.startswith("network: SSLError at other.example:")
    assert (
        "not valid for 'other.example'" in outcome.reason or "Hostname mismatch" in outcome.reason
    )
    assert len(server.received) == 2


def test_a_certificate_for_the_address_is_none_for_the_name(
    secure: Secure, authority: Authority
) -> None:
    server = secure("IP:127.0.0.1")
    caller = Caller(ca_file=str(authority.file))
    assert caller.post(server.url("/", "127.0.0.1", "https")) == Done()
    assert caller.post(server.url("/", "partner.example", "https")).reason.startswith(
        "network: SSLError"
    )


def test_a_certificate_of_an_unknown_authority_is_refused(secure: Secure) -> None:
    server = secure("DNS:partner.example")
    outcome = Caller().post(server.url("/", "partner.example", "https"))
    assert outcome.reason.startswith("network: SSLError")
    assert "certificate" in outcome.reason
    assert server.received == []


def test_trouble_by_tls_is_bounded_in_time_as_well(secure: Secure, authority: Authority) -> None:
    server = secure("DNS:partner.example")
    server.answers = {
        "/head": drip(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        "/body": drip(HEAD, b"x"),
        "/hang": hang,
    }
    caller = Caller(ca_file=str(authority.file))
    for path in ("/head", "/hang"):
        assert caller.post(server.url(path, "partner.example", "https")).reason.startswith(
            "network: "
        )
    assert caller.post(server.url("/body", "partner.example", "https")).reason.startswith(
        "HTTP 500"
    )
    with _listener() as port:
        outcome = caller.post(f"https://partner.example:{port}/")
    assert outcome.reason.startswith("network: ")


# -- tasks ----------------------------------------------------------------------------------------


@pytest.fixture
def delays(tmp_path: Path) -> Iterator[DelayTasks]:
    made = delays_on(
        f"sqlite:///{tmp_path / 'test.sqlite3'}",
        callback_allow="127.0.0.1",
        callback_secrets=SECRETS[0],
    )
    migrations.upgrade(wiring_of(made).store.database)
    record(made)
    yield made
    made.close()


def test_a_partner_is_notified_until_it_answers(delays: DelayTasks, web: WebServer) -> None:
    web.answers["/paid"] = answer(500, b"busy")
    scheduled = delays.schedule_callback(
        web.url("/paid"), {"order": 7}, 0, headers={"X-Shop": "one"}, key="order-7"
    )
    assert scheduled.tag == CALLBACK
    first = run_now(delays, scheduled)
    assert first.status is Status.NOT_COMPLETE
    assert first.error == "HTTP 500\nbusy"
    assert 14 < (first.expected_time - wiring_of(delays).clock.now()).total_seconds() <= 15
    web.answers["/paid"] = reset
    second = run_now(delays, scheduled)
    assert second.error is not None
    assert second.error.startswith("network: ")
    web.answers.clear()
    assert run_now(delays, scheduled).status is Status.DONE
    assert [
        attempt.error.split(" ")[0] for attempt in delays.attempts(scheduled) if attempt.error
    ] == [
        "HTTP",
        "network:",
    ]
    assert {request.headers["webhook-id"] for request in web.received} == {str(scheduled.id)}
    assert {request.body for request in web.received} == {b'{"order":7}'}


def test_410_leaves_failed_at_once(delays: DelayTasks, web: WebServer) -> None:
    web.answers["/"] = answer(410)
    assert run_now(delays, delays.schedule_callback(web.url(), None, 0)).status is Status.FAILED


def test_a_callback_may_bring_a_ladder_and_an_end_of_its_own(
    delays: DelayTasks, web: WebServer
) -> None:
    web.answers["/"] = answer(500)
    task = delays.schedule_callback(
        web.url(), None, 0, retry=RetrySchedule("1h"), expires="1d", priority=3, queue="slow"
    )
    assert (task.priority, task.queue, task.expires_s) == (3, "slow", 86400)
    assert run_now(delays, task).status is Status.NOT_COMPLETE
    assert run_now(delays, task).status is Status.FAILED


def test_rows_of_other_programs_are_callbacks_too(delays: DelayTasks, web: WebServer) -> None:
    good = delays.schedule_delay(CALLBACK, {"url": web.url()}, 0)
    assert run_now(delays, good).status is Status.DONE
    for body in (
        None,
        [],
        {},
        {"url": web.url(), "method": "GET"},
        {"url": web.url(), "headers": {"Host": "x"}},
    ):
        with pytest.raises(BodyRefusedError):
            delays.schedule_delay(CALLBACK, body, 0)
    for url in (7, "file:///etc/passwd", "https://10.0.0.1/"):
        forbidden = run_now(delays, delays.schedule_delay(CALLBACK, {"url": url}, 0))
        assert forbidden.status is Status.NOT_COMPLETE, "the setting may change"
        assert (forbidden.error or "").startswith("forbidden: ")


@pytest.mark.parametrize(
    "url", ["https://10.0.0.1/", "http://[::1]/", "https://user@partner.example/", "nonsense"]
)
def test_a_forbidden_url_is_refused_when_it_is_scheduled(delays: DelayTasks, url: str) -> None:
    with pytest.raises(ForbiddenURLError):
        delays.schedule_callback(url, None, 0)
    assert len(delays.find()) == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"X": "a\r\nY: b"}, {"X": "a\nb"}, {"X": "\x00"}, {"X": "é"}, {"X": ""}, {"X": 7},
        {"X Y": "a"}, {"": "a"},
        {"X:": "a"}, {"Host": "other"}, {"content-length": "1"},
        {"Transfer-Encoding": "chunked"}, {7: "a"},
        {"Webhook-Id": "1"}, {"webhook-signature": "v1,x"}, {"Connection": "close"},
        {"X": "a", "x": "b"}, ["X"],
        {"Proxy-Authorization": "a"}, {"X": " a"},
    ],
)  # fmt: skip
def test_a_header_that_can_not_be_sent_is_refused(delays: DelayTasks, headers: Any) -> None:
    with pytest.raises(InvalidHeaderError):
        delays.schedule_callback("https://partner.example/", None, 0, headers=headers)


def test_a_body_that_is_not_json_is_refused_by_its_path(delays: DelayTasks) -> None:
    with pytest.raises(BodyNotJSONError, match=r"\$\.body\.items"):
        delays.schedule_callback("https://partner.example/", {"items": {1}}, 0)


def test_secrets_are_not_shown() -> None:
    settings = load_settings({}, {"DELAYTASKS_CALLBACK_SECRETS": " ".join(SECRETS)})
    assert settings.callback_secrets == tuple(SECRETS)
    for secret in SECRETS:
        assert secret.removeprefix("whsec_") not in f"{settings!r} {settings.effective()}"


# -- simultaneous calls ---------------------------------------------------------------------------


def test_a_name_is_looked_up_once_for_all_callbacks_that_want_it_at_the_same_time(
    web: WebServer,
) -> None:
    everybody = threading.Event()

    def names(host: str) -> list[str]:
        # The other callers get the time to resolve the name, too.
        everybody.wait(2)
        return ["127.0.0.1"]

    caller = Caller(names, allow="partner.example", connect_s=10, read_s=10, total_s=60)
    with ThreadPoolExecutor(30) as pool:
        posts = [pool.submit(caller.post, web.url(host="partner.example")) for _ in range(30)]
        threading.Timer(0.3, everybody.set).start()
        assert [post.result(PATIENCE_S) for post in posts] == [Done()] * 30
    assert caller.looked_up == ["partner.example"]


def test_who_waits_for_a_name_that_somebody_else_looks_up_waits_no_longer_than_for_its_own() -> (
    None
):
    never = threading.Event()

    def names(host: str) -> list[str]:
        never.wait(PATIENCE_S)
        return ["127.0.0.1"]

    caller = Caller(names, allow="partner.example", connect_s=0.2)
    with ThreadPoolExecutor(5) as pool:
        outcomes = [
            f.result(PATIENCE_S)
            for f in [pool.submit(caller.post, "http://partner.example/") for _ in range(5)]
        ]
    never.set()
    assert all(
        isinstance(outcome, Retry) and "no answer within" in outcome.reason for outcome in outcomes
    )


def test_a_process_sends_as_many_callbacks_at_once_as_the_setting_says(
    web: WebServer, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {"callback_in_flight": 7, "chunk_time_box_s": 5}
    delays = delays_on(
        f"sqlite:///{tmp_path / 'tasks.sqlite3'}", callback_allow="127.0.0.1", **changes
    )
    migrations.upgrade(wiring_of(delays).store.database, "")
    inside, most, lock, all_in = 0, 0, threading.Lock(), threading.Event()

    def count(exchange: Any) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        if most == 7:
            all_in.set()
        all_in.wait(PATIENCE_S)
        with lock:
            inside -= 1
        answer()(exchange)

    web.answers["/"] = count
    tasks = [delays.schedule_callback(web.url(), {"order": n}, 0) for n in range(20)]
    while delays.runner().drain("default", range(10), 100).claimed:
        pass
    assert {delays.get(task).status for task in tasks} == {Status.DONE}
    assert most == 7
    delays.close()
