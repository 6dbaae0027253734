"""Callbacks by HTTP: requests, where they may go, and the answers that decide about a retry.
Callbacks by queues: messages that foreign consumers read, and what becomes of the tasks.
"""

from __future__ import annotations

import base64
import json
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection, Exchange, Queue
from redis import Redis
from standardwebhooks import Webhook

from delaytasks import (
    BodyRefusedError,
    DelayedTask,
    DelayTasks,
    Done,
    Fail,
    ForbiddenURLError,
    InvalidInputError,
    Retry,
    RetrySchedule,
    Status,
)
from delaytasks.callbacks.sending import Callback, Guard, HttpCallbacks, Message, retry_after_s
from delaytasks.model.clock import Clock
from delaytasks.model.inputs import CALLBACK, MESSAGE
from delaytasks.runtime import runtime_of
from delaytasks.settings import load_settings
from tests.conftest import closing_all
from tests.proxy import Exchange as HttpExchange
from tests.proxy import Proxy, WebServer, answer, drip, hang, pour, proxy_to, reset
from tests.refusals import invalid
from tests.services import free_port, self_signed
from tests.waiting import in_child, within
from tests.world.recording import delays_on, make_tables, record, run_now, runner_of

SECRETS = ["whsec_" + base64.b64encode(letter * 32).decode() for letter in (b"a", b"b")]
#: Each test ends within this many seconds; the limits under test are much shorter.
PATIENCE_S = 20


class Caller:
    """Send callbacks as a process does, with a name resolution of the test's own."""

    def __init__(
        self, names: Callable[[str], list[str]] | None = None, ca_file: str = "", **settings: Any
    ) -> None:
        """`settings` are those of callbacks, and the limits `connect_s` and `read_s`."""
        usual = {"allow": "127.0.0.1", "timeout": 1, "connect_s": 2, "read_s": 0.5}
        given = {
            f"{'_' * name.endswith('_s')}callback_{name}": value
            for name, value in {**usual, **settings}.items()
        }
        own, self._ca_file, self.looked_up = load_settings({}, {}, **given), ca_file, list[str]()

        def resolve(host: str, port: int) -> list[str]:
            self.looked_up.append(host)
            return names(host) if names is not None else ["127.0.0.1"]

        self._http = HttpCallbacks(own, Guard(own.callback_allow, resolve), Clock())

    def post(
        self, url: str, body: Any = None, attempt: int = 1, headers_json: Any = None, **more: Any
    ) -> Any:
        """Return the outcome, or raise `TimeoutError` if the callback does not end in time."""
        due = datetime.now(timezone.utc) - timedelta(hours=1)
        task = DelayedTask(42, CALLBACK, "{}", due, runs=attempt, headers_json=headers_json)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", self._ca_file)
            return within(PATIENCE_S, partial(self._http, Callback(url, body, **more), task))


@pytest.fixture
def caller() -> Caller:
    return Caller()


Make = Callable[..., DelayTasks]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make instances with tables of their own, which may send to a broker."""

    def new(broker_url: str = "", **settings: Any) -> DelayTasks:
        settings = {"callback_broker_url": broker_url, "_callback_connect_s": 5, **settings}
        delays = delays_on(f"sqlite:///{tmp_path / secrets.token_hex(4)}.sqlite3", **settings)
        make_tables(delays)
        record(delays)
        return delays

    with closing_all(new) as make:
        yield make


@pytest.fixture
def delays(make: Make) -> DelayTasks:
    return make(callback_allow="127.0.0.1", callback_secrets=SECRETS[0])


def test_a_callback_is_a_post_of_json_that_the_official_package_verifies(web: WebServer) -> None:
    body = {"order": 7, "name": "é", "big": 2**60, "text": "\u2028\U0001f600"}
    headers = {"X-Shop": "one", "user-agent": "shop"}
    assert Caller(secrets=SECRETS).post(web.url("/paid?a=1"), body, headers=headers) == Done()
    assert Caller().post(web.url()) == Done()
    request, unsigned = web.received
    assert "webhook-signature" not in unsigned.headers
    assert request.path == "/paid?a=1"
    wanted = {"content-type": "application/json", "user-agent": "shop", "x-shop": "one"}
    wanted |= {"host": f"127.0.0.1:{web.port}", "webhook-id": "42"}
    assert request.headers == request.headers | wanted
    for secret in SECRETS:  # it refuses the time of the task, which is an hour ago
        assert Webhook(secret).verify(request.body, request.headers) == body


# -- allowed destinations ------------------------------------------------------------------------


def test_a_callback_goes_to_an_address_that_was_checked_for_it(web: WebServer) -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["169.254.169.254"], ["127.0.0.1", "10.0.0.1"]])
    caller, url = Caller(lambda host: next(answers)), web.url("/", "partner.example")
    assert caller.post(url) == Done()
    assert web.received[-1].headers["host"] == f"partner.example:{web.port}"
    assert caller.looked_up == ["partner.example"], "once for each connection"
    for bad in ("127.0.0.2", "169.254.169.254", "10.0.0.1"):
        reason = caller.post(url).reason
        assert reason.startswith("forbidden: callbacks may not go to ")
        assert f"now {bad}" in reason
    assert Caller(allow="").post(web.url()).reason.startswith("forbidden: "), "since scheduling"
    assert len(web.received) == 1
    some = Caller(lambda host: ["127.0.0.2", "127.0.0.1"], allow="127.0.0.0/8")
    assert some.post(url) == Done(), "the next address is used if one refuses"
    down = Caller(lambda host: ["127.0.0.2", "127.0.0.3"], allow="127.0.0.0/8")
    assert f"at partner.example:{web.port} (127.0.0.3): " in down.post(url).reason


# -- answers ---------------------------------------------------------------------------------------


OUTCOMES: dict[int, Any] = {
    **dict.fromkeys([200, 201, 202, 204, 299], Done()),
    410: Fail("HTTP 410\ngone"),
    **{status: Retry(None, f"HTTP {status}\ngone") for status in (400, 404, 500, 503, 599)},
    **{
        status: Retry(None, f"HTTP {status}, to /other: redirects are not followed\ngone")
        for status in (301, 307)
    },
    101: Retry(None, "HTTP 101"),
}


def test_the_status_decides_and_redirects_are_never_followed(
    web: WebServer, caller: Caller
) -> None:
    for status, outcome in OUTCOMES.items():
        web.answers["/"] = answer(status, b"gone", Location="/other")
        assert caller.post(web.url()) == outcome
    assert {request.path for request in web.received} == {"/"}
    web.answers["/"] = answer(500, b"no\r\n\x1b[31m such \x00 order" + b"!" * 5000)
    _, quoted = caller.post(web.url()).reason.split("\n")
    assert quoted.startswith(r"no\r\n\x1b[31m such \x00 order!!!")
    assert len(quoted) < 600


def test_retry_after_lengthens_waits_to_a_cap(web: WebServer, caller: Caller) -> None:
    def after(value: str, status: int = 503, **task: Any) -> Any:
        web.answers["/"] = answer(status, b"", Retry_After=value)
        return caller.post(web.url(), **task).after

    assert after("120") == after("120", status=429) == 120
    assert after("5") is None, "the first delay of the retry schedule is longer"
    assert after("120", attempt=10) is None, "no delay is left"
    assert after("120", status=500) is None
    assert after("999999999") == 86400
    soon = format_datetime(datetime.now(timezone.utc) + timedelta(hours=1), usegmt=True)
    assert 3500 < after(soon) <= 3600
    own = '{"retry": {"retry_delays_s": [1], "variation": 0}}'
    assert after("20", headers_json=own) == 20, "the task has a retry schedule of its own"


def test_dates_of_retry_after_are_read_in_all_their_forms() -> None:
    now = datetime(2030, 1, 1, 12, 0, tzinfo=timezone.utc)
    for time in ("12:01:00 GMT", "13:01:00 +0100", "12:01:00 -0000"):
        assert retry_after_s(f"Tue, 01 Jan 2030 {time}", now) == 60, time
    for text in ("", "-1", "1.5", "1e3", "x", "Tue, 99 Jan 2030 12:01:00 GMT", "9" * 400):
        assert retry_after_s(text, now) == 0, text


# -- broken connections and answers --------------------------------------------------------------


CLOSING = b"HTTP/1.1 500 No\r\nConnection: close\r\n\r\n"


def then(fault: Any, head: bytes) -> Any:
    return lambda exchange: exchange.wfile.write(head) and fault(exchange)


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
        "silence": then(hang, head),
        "a reset": then(reset, head),
    }


#: What the server does, and the beginning of the reason; the status 200 needs none.
BROKEN: dict[str, tuple[Any, str]] = {
    "silence": (hang, "network: "),
    "a reset": (reset, "network: "),
    "a drip of headers": (drip(b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x"), "network: "),
    "a drip of header lines": (drip(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"), "network: "),
    "a drip of statuses": (drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "network: "),
    "an endless header": (partial(pour, b"HTTP/1.1 200 OK\r\nX: "), "network: "),
    "no HTTP": (lambda it: it.wfile.write(b"SSH-2.0-x\r\n\r\n") and None, "network: "),
    **{f"500, body: {it}": (fault, "HTTP 500") for it, fault in broken_bodies(500).items()},
    "200, body: a drip": (broken_bodies(200)["a drip"], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_an_answer_that_breaks_off_is_given_up_in_bounded_time_and_its_status_decides(
    web: WebServer, caller: Caller, broken: str
) -> None:
    web.answers["/hook"], reason = BROKEN[broken]
    outcome = caller.post(web.url("/hook?token=hunter2"))
    if not reason:
        assert outcome == Done()
    else:
        assert isinstance(outcome, Retry)
        assert outcome.reason.startswith(reason)
        assert "hunter2" not in outcome.reason
        where = f"at 127.0.0.1:{web.port} (127.0.0.1): "
        assert (where in outcome.reason) is (reason == "network: ")
    web.answers.clear()
    assert caller.post(web.url()) == Done(), "and no other callback suffers"
    assert web.accepted == 2, "its connection is not used again"


def test_interim_answers_and_an_endless_body_are_read_up_to_the_cap(
    web: WebServer, caller: Caller
) -> None:
    def write(number: int, exchange: HttpExchange) -> None:
        line = b"HTTP/1.1 %d Wait\r\nLink: </style.css>; rel=preload\r\n\r\n"
        parts = [line % (100, 103, 199)[n % 3] for n in range(number)] + [CLOSING]
        exchange.wfile.write(b"".join(parts))

    for number, reason in ((10, "HTTP 500"), (10_000, "the response is too long")):
        web.answers["/"] = partial(write, number)
        assert reason in caller.post(web.url()).reason
    web.answers["/"] = partial(pour, CLOSING)  # it is read to the cap
    assert Caller(timeout=600, read_s=600).post(web.url()).reason.startswith("HTTP 500")


def test_receivers_that_do_not_read_refuse_or_have_no_address_are_network_errors() -> None:
    caller, over = Caller(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        outcome = caller.post(f"http://127.0.0.1:{mute.getsockname()[1]}/", "x" * 50_000_000)
    assert outcome.reason.startswith("network: "), "it is given up in time"
    outcome = caller.post(f"http://127.0.0.1:{free_port()}/")
    assert "network: ConnectionRefusedError at " in outcome.reason

    def unknown(host: str) -> list[str]:
        raise OSError("Name or service not known")

    silent = Caller(lambda host: [str(over.wait())], connect_s=0.2)
    for caller, reason in (
        (Caller(unknown), "network: OSError at partner.example: Name or service not known"),
        (silent, "network: TimeoutError at partner.example: no answer within 0.2 s"),
    ):
        assert caller.post("https://partner.example/").reason == reason
    over.set()


# -- Callbacks by TLS -----------------------------------------------------------------------------


def test_tls_callbacks_ask_for_the_certificate_of_the_name_and_are_bounded_in_time(
    tmp_path: Path,
) -> None:
    certificate, asked = self_signed(tmp_path, "DNS:partner.example"), list[str]()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.file, certificate.key)
    context.sni_callback = lambda sock, name, _: asked.append(name)
    trusting, name = Caller(ca_file=str(certificate.file)), "partner.example"
    with closing(WebServer(context)) as server:
        assert trusting.post(server.url("/", name, "https")) == Done()
        assert asked == [name], "and not for the address that was checked"
        for caller, host in ((Caller(), name), (trusting, "other.example")):
            reason = caller.post(server.url("/", host, "https")).reason
            assert reason.startswith(f"network: SSLCertVerificationError at {host}:")
        assert len(server.received) == 1
        head = b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\n"
        server.answers = {"/head": drip(head[:20], b"x"), "/body": drip(head, b"x")}
        for path, reason in (("/head", "network: "), ("/body", "HTTP 500")):
            assert trusting.post(server.url(path, name, "https")).reason.startswith(reason)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        outcome = trusting.post(f"https://{name}:{mute.getsockname()[1]}/")
    assert outcome.reason.startswith("network: ")


# -- Callbacks as tasks: they are scheduled, checked and retried ----------------------------------


def test_a_partner_is_notified_until_it_answers(delays: DelayTasks, web: WebServer) -> None:
    web.answers["/paid"] = answer(500, b"busy")
    scheduled = delays.callbacks.post(web.url("/paid"), {"order": 7}, 0, headers={"X-Shop": "one"})
    first = run_now(delays, scheduled)
    assert (first.tag, first.status) == (CALLBACK, Status.NOT_COMPLETE)
    assert first.error == "HTTP 500\nbusy"
    assert 14 < (first.expected_time - runtime_of(delays).clock.now()).total_seconds() <= 15
    web.answers.clear()
    assert run_now(delays, scheduled).status is Status.DONE
    assert {request.headers["webhook-id"] for request in web.received} == {str(scheduled.id)}
    assert {request.body for request in web.received} == {b'{"order":7}'}
    web.answers["/"] = answer(500)
    own = {"retries": RetrySchedule("1h"), "max_late": "1d", "priority": 3, "queue": "slow"}
    task = delays.callbacks.post(web.url(), None, 0, **own)
    assert (task.priority, task.queue, task.max_late_s) == (3, "slow", 86400)
    assert run_now(delays, task).status is Status.NOT_COMPLETE
    assert run_now(delays, task).status is Status.FAILED


def test_several_callbacks_are_sent_at_a_time(delays: DelayTasks, web: WebServer) -> None:
    meeting = threading.Barrier(10)

    def meet(exchange: HttpExchange) -> None:
        meeting.wait(20)
        answer()(exchange)

    web.answers["/paid"] = meet
    calls = [delays.callbacks.post(web.url("/paid"), n, 0) for n in range(20)]
    while runner_of(delays).run_due("default", range(10), 100).claimed:
        pass
    assert {delays.get(task).status for task in calls} == {Status.DONE}
    assert sorted(int(request.body) for request in web.received) == list(range(20))


def test_rows_of_other_programs_are_callbacks_too(delays: DelayTasks, web: WebServer) -> None:
    named = {"url": web.url()}
    assert run_now(delays, delays.schedule_delay(CALLBACK, named, 0)).status is Status.DONE
    for body in (None, {}, {**named, "method": "GET"}, {**named, "headers": {"Host": "x"}}):
        with pytest.raises(BodyRefusedError):
            delays.schedule_delay(CALLBACK, body, 0)
    for url in (7, "file:///etc/passwd", "https://10.0.0.1/"):
        forbidden = run_now(delays, delays.schedule_delay(CALLBACK, {"url": url}, 0))
        assert forbidden.status is Status.NOT_COMPLETE, "the setting may change"
        assert (forbidden.error or "").startswith("forbidden: ")


BAD_HEADERS: list[Any] = [
    {"X": "a\r\nY: b"}, {"X": "a\nb"}, {"X": "\x00"}, {"X": "é"}, {"X": ""}, {"X": 7},
    {"X Y": "a"}, {"": "a"}, {"X:": "a"}, {"Host": "other"}, {"content-length": "1"},
    {"Transfer-Encoding": "chunked"}, {7: "a"}, {"Webhook-Id": "1"}, {"webhook-signature": "v1,x"},
    {"Connection": "close"}, ["X"], {"Proxy-Authorization": "a"}, {"X": " a"}, {"X": "a", "x": "b"},
]  # fmt: skip


def test_what_cannot_be_sent_is_refused_when_it_is_scheduled(delays: DelayTasks) -> None:
    post, url = delays.callbacks.post, "https://partner.example/"
    for bad in ("https://10.0.0.1/", "http://[::1]/", "https://user@partner.example/", "nonsense"):
        with pytest.raises(ForbiddenURLError):
            post(bad, None, 0)
    for headers in BAD_HEADERS:
        with invalid("headers"):
            post(url, None, 0, headers=headers)
    with invalid("body", match=r"\$\.body\.items"):
        post(url, {"items": {1}}, 0)
    assert len(delays.find()) == 0


# -- Callbacks by queues --------------------------------------------------------------------------


BODY = {"order": 7, "name": "é"}


@pytest.fixture
def queue() -> str:
    """Return the name of a queue and of an exchange that only this test declares."""
    return "dt_test_" + secrets.token_hex(4)


@pytest.fixture
def rabbit(rabbitmq_url: str, queue: str) -> Iterator[Any]:
    """Yield a channel of a consumer."""
    with Connection(rabbitmq_url) as connection:
        yield connection.default_channel
        connection.default_channel.queue_delete(queue)
        for exchange in (queue, f"{queue}.topic"):  # the first one is kombu's
            connection.default_channel.exchange_delete(exchange)


def send(delays: DelayTasks, to: str, body: Any = None, **options: Any) -> DelayedTask:
    return run_now(delays, delays.callbacks.publish(to, body, 0, **options))


def is_retried(task: DelayedTask, error: str) -> bool:
    """Return whether the task waits for another attempt because of an error."""
    return task.status is Status.NOT_COMPLETE and error in (task.error or "")


def bodies(channel: Any, queue: str) -> list[Any]:
    """Return the bodies of the messages in a queue, and acknowledge them."""
    messages = iter(lambda: channel.basic_get(queue, no_ack=True), None)
    return [json.loads(message.body) for message in messages]


def test_a_consumer_on_the_apps_rabbitmq_gets_body_and_id_as_soon_as_a_queue_is_declared(
    make: Make, rabbitmq_url: str, rabbit: Any, queue: str
) -> None:
    delays = make("")  # without the setting, messages are sent to the broker of the app
    runtime_of(delays).celery.conf.broker_url = rabbitmq_url
    task = send(delays, queue, BODY, headers={"shop": "one", "n": 1})
    assert is_retried(task, "NO_ROUTE")
    rabbit.queue_declare(queue, durable=True, auto_delete=False)
    assert run_now(delays, task).status is Status.DONE
    with Connection(rabbitmq_url).SimpleQueue(queue) as messages:
        message = messages.get(timeout=5)
        message.ack()
    assert message.payload == BODY
    assert message.content_type == "application/json"
    assert message.headers == {"shop": "one", "n": 1}
    assert message.properties["message_id"] == str(task.id)
    routed = partial(send, delays, body=BODY, exchange=f"{queue}.topic")
    assert is_retried(routed("order.paid"), "NOT_FOUND - no exchange")
    exchange = Exchange(f"{queue}.topic", "topic")(rabbit)
    exchange.declare()
    Queue(queue, exchange, "order.*")(rabbit).queue_bind()
    assert routed("order.paid").status is Status.DONE
    assert bodies(rabbit, queue) == [BODY]


def test_a_consumer_on_redis_gets_a_message_of_kombu(
    make: Make, redis_url: str, queue: str
) -> None:
    delays = make(redis_url)
    task = send(delays, queue, BODY, headers={"shop": "one"})
    assert task.status is Status.DONE
    with Redis.from_url(redis_url) as client:
        popped: Any = client.brpop([queue], timeout=5)
    message = json.loads(popped[1])
    assert json.loads(base64.b64decode(message["body"])) == BODY
    assert message["headers"] == {"shop": "one"}
    assert message["properties"]["message_id"] == str(task.id)
    failed = send(delays, "key", BODY, exchange=queue)
    problem = "redis has no exchanges: on it a message goes to a queue"
    assert (failed.status, failed.error) == (Status.FAILED, problem)


def test_connections_are_kept_and_replaced_and_never_shared(
    make: Make, rabbitmq_url: str, proxies: list[Proxy], rabbit: Any, queue: str
) -> None:
    rabbit.queue_declare(queue, durable=True, auto_delete=False)
    proxies.append(proxy := proxy_to(rabbitmq_url))
    delays = make(proxy.url(rabbitmq_url), _callback_connect_s=1)
    task, call = send(delays, queue, -3), runtime_of(delays).queue_callbacks
    assert in_child(lambda: call(Message(queue, -2), task))
    proxy.reset()
    assert send(delays, queue, -1).runs == 1, "a connection that was closed uses no attempt"
    assert proxy.accepted == 3
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: call(Message(queue, n), task), range(100)))
    assert sorted(bodies(rabbit, queue)) == list(range(-3, 100))
    assert proxy.accepted <= 3 + 4, "one for each thread"
    proxy.swallow()
    unconfirmed = send(delays, queue, BODY)
    assert is_retried(unconfirmed, "timed out")
    proxy.heal()
    assert run_now(delays, unconfirmed).status is Status.DONE


def test_an_invalid_queue_name_or_header_is_refused(make: Make) -> None:
    delays = make("")
    wrong: list[Any] = [None, 7, "", "a\n", "\ud800", "é" * 128]
    for to in wrong:
        with invalid("to"):
            delays.callbacks.publish(to, None, 0)
    with pytest.raises(InvalidInputError):
        delays.callbacks.publish("key", None, 0, exchange=7)
    with pytest.raises(BodyRefusedError):
        delays.schedule_delay(MESSAGE, {"to": "x", "exchange": 7}, 0)
    with invalid("headers"):
        delays.callbacks.publish("queue", None, 0, headers=["a"])
