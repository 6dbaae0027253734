"""The requests of callbacks, and the addresses that they may go to."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from standardwebhooks import Webhook

from delaytasks import BodyRefusedError, DelayTasks, Done, ForbiddenURLError, RetrySchedule, Status
from delaytasks.model.clock import Clock
from delaytasks.model.inputs import CALLBACK
from delaytasks.runtime import runtime_of
from tests.integration.http_callbacks.conftest import PATIENCE_S, SECRETS, Caller
from tests.proxy import WebServer, answer, reset
from tests.refusals import invalid
from tests.world.recording import record, run_now, runner_of


def test_a_callback_is_a_post_of_json_that_the_official_package_verifies(web: WebServer) -> None:
    caller = Caller(secrets=SECRETS)
    body = {"order": 7, "name": "é", "big": 2**60, "text": "\u2028\U0001f600"}
    headers = {"X-Shop": "one", "user-agent": "shop"}
    assert caller.post(web.url("/paid?a=1"), body, headers=headers) == Done()
    assert Caller().post(web.url()) == Done()
    request, unsigned = web.received
    assert "webhook-signature" not in unsigned.headers
    assert request.path == "/paid?a=1"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["user-agent"] == "shop"
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


# -- allowed destinations ------------------------------------------------------------------------


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(web: WebServer) -> None:
    caller = Caller(lambda host: ["127.0.0.1"])
    assert caller.post(web.url("/paid", "partner.example")) == Done()
    assert web.received[-1].headers["host"] == f"partner.example:{web.port}"
    assert caller.looked_up == ["partner.example"], "once for each connection"


def test_a_name_that_resolves_to_a_forbidden_address_later_is_refused(web: WebServer) -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["169.254.169.254"], ["127.0.0.1", "10.0.0.1"]])
    caller = Caller(lambda host: next(answers))
    url = web.url("/", "partner.example")
    assert caller.post(url) == Done()
    for bad in ("127.0.0.2", "169.254.169.254", "10.0.0.1"):
        outcome = caller.post(url)
        assert outcome.reason.startswith("forbidden: callbacks may not go to ")
        assert f"now {bad}" in outcome.reason
    assert len(web.received) == 1


def test_the_next_address_of_a_name_is_used_if_one_refuses(web: WebServer) -> None:
    caller = Caller(lambda host: ["127.0.0.2", "127.0.0.1"], allow="127.0.0.0/8")
    assert caller.post(web.url("/", "partner.example")) == Done()
    down = Caller(lambda host: ["127.0.0.2", "127.0.0.3"], allow="127.0.0.0/8")
    reason = down.post(web.url("/", "partner.example")).reason
    assert f"at partner.example:{web.port} (127.0.0.3): " in reason


def test_a_url_that_became_forbidden_after_scheduling_is_not_called(web: WebServer) -> None:
    outcome = Caller(allow="").post(web.url())
    assert outcome.reason.startswith("forbidden: ")
    assert web.received == []


# -- simultaneous calls --------------------------------------------------------------------------


def test_a_process_sends_several_callbacks_at_a_time(web: WebServer, delays: DelayTasks) -> None:
    delays._renew_runtime(_chunk_time_budget_s=5)
    record(delays)
    all_in = threading.Barrier(20)

    def meet(exchange: Any) -> None:
        all_in.wait(PATIENCE_S)
        answer()(exchange)

    web.answers["/"] = meet
    tasks = [delays.callbacks.post(web.url(), {"order": n}, 0) for n in range(20)]
    while runner_of(delays).run_due("default", range(10), 100).claimed:
        pass
    assert {delays.get(task).status for task in tasks} == {Status.DONE}


# -- Callbacks as tasks: they are scheduled, checked and retried ----------------------------------


def test_a_partner_is_notified_until_it_answers(delays: DelayTasks, web: WebServer) -> None:
    web.answers["/paid"] = answer(500, b"busy")
    scheduled = delays.callbacks.post(
        web.url("/paid"), {"order": 7}, 0, headers={"X-Shop": "one"}, key="order-7"
    )
    assert scheduled.tag == CALLBACK
    first = run_now(delays, scheduled)
    assert first.status is Status.NOT_COMPLETE
    assert first.error == "HTTP 500\nbusy"
    assert 14 < (first.expected_time - runtime_of(delays).clock.now()).total_seconds() <= 15
    web.answers["/paid"] = reset
    second = run_now(delays, scheduled)
    assert second.error is not None
    assert second.error.startswith("network: ")
    web.answers.clear()
    assert run_now(delays, scheduled).status is Status.DONE
    attempts = delays.get(scheduled, attempts=True).attempts
    assert [str(attempt.error).split(" ")[0] for attempt in attempts] == ["HTTP", "network:"]
    assert {request.headers["webhook-id"] for request in web.received} == {str(scheduled.id)}
    assert {request.body for request in web.received} == {b'{"order":7}'}


def test_a_callback_may_have_its_own_retries_and_expiry(delays: DelayTasks, web: WebServer) -> None:
    web.answers["/"] = answer(500)
    task = delays.callbacks.post(
        web.url(), None, 0, retries=RetrySchedule("1h"), max_late="1d", priority=3, queue="slow"
    )
    assert (task.priority, task.queue, task.max_late_s) == (3, "slow", 86400)
    assert run_now(delays, task).status is Status.NOT_COMPLETE
    assert run_now(delays, task).status is Status.FAILED


def test_rows_of_other_programs_are_callbacks_too(delays: DelayTasks, web: WebServer) -> None:
    good = delays.schedule_delay(CALLBACK, {"url": web.url()}, 0)
    assert run_now(delays, good).status is Status.DONE
    named = {"url": web.url()}
    refused: list[Any] = [None, {}, {**named, "method": "GET"}, {**named, "headers": {"Host": "x"}}]
    for body in refused:
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
        delays.callbacks.post(url, None, 0)
    assert len(delays.find()) == 0


@pytest.mark.parametrize(
    "headers",
    [
        {"X": "a\r\nY: b"}, {"X": "a\nb"}, {"X": "\x00"}, {"X": "é"}, {"X": ""}, {"X": 7},
        {"X Y": "a"}, {"": "a"},
        {"X:": "a"}, {"Host": "other"}, {"content-length": "1"},
        {"Transfer-Encoding": "chunked"}, {7: "a"},
        {"Webhook-Id": "1"}, {"webhook-signature": "v1,x"}, {"Connection": "close"},
        ["X"],
        {"Proxy-Authorization": "a"}, {"X": " a"}, {"X": "a", "x": "b"},
    ],
)  # fmt: skip
def test_a_header_that_cannot_be_sent_is_refused(delays: DelayTasks, headers: Any) -> None:
    with invalid("headers"):
        delays.callbacks.post("https://partner.example/", None, 0, headers=headers)


def test_a_body_that_is_not_json_is_refused_by_its_path(delays: DelayTasks) -> None:
    with invalid("body", match=r"\$\.body\.items"):
        delays.callbacks.post("https://partner.example/", {"items": {1}}, 0)
