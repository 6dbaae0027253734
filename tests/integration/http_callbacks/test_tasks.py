"""Callbacks as tasks: they are scheduled, checked and retried."""

from __future__ import annotations

from typing import Any

import pytest

from delaytasks import DelayTasks, RetrySchedule, Status
from delaytasks.core.celery_calls import CALLBACK
from delaytasks.core.errors import (
    BodyNotJSONError,
    BodyRefusedError,
    ForbiddenURLError,
    InvalidHeaderError,
)
from delaytasks.core.settings import load_settings
from delaytasks.runtime import runtime_of
from tests.integration.http_callbacks.caller import SECRETS
from tests.proxy import WebServer, answer, reset
from tests.recording import run_now


def test_a_partner_is_notified_until_it_answers(delays: DelayTasks, web: WebServer) -> None:
    web.answers["/paid"] = answer(500, b"busy")
    scheduled = delays.schedule_callback(
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
    assert [
        attempt.error.split(" ")[0] for attempt in delays.attempts(scheduled) if attempt.error
    ] == [
        "HTTP",
        "network:",
    ]
    assert {request.headers["webhook-id"] for request in web.received} == {str(scheduled.id)}
    assert {request.body for request in web.received} == {b'{"order":7}'}


def test_status_410_fails_the_task_without_a_retry(delays: DelayTasks, web: WebServer) -> None:
    web.answers["/"] = answer(410)
    assert run_now(delays, delays.schedule_callback(web.url(), None, 0)).status is Status.FAILED


def test_a_callback_may_have_its_own_retry_schedule_and_expiry(
    delays: DelayTasks, web: WebServer
) -> None:
    web.answers["/"] = answer(500)
    task = delays.schedule_callback(
        web.url(), None, 0, retries=RetrySchedule("1h"), expires="1d", priority=3, queue="slow"
    )
    assert (task.priority, task.queue, task.expires_s) == (3, "slow", 86400)
    assert run_now(delays, task).status is Status.NOT_COMPLETE
    assert run_now(delays, task).status is Status.FAILED


def test_rows_of_other_programs_are_callbacks_too(delays: DelayTasks, web: WebServer) -> None:
    good = delays.schedule_delay(CALLBACK, {"url": web.url()}, 0)
    assert run_now(delays, good).status is Status.DONE
    refused: list[Any] = [
        None,
        [],
        {},
        {"url": web.url(), "method": "GET"},
        {"url": web.url(), "headers": {"Host": "x"}},
    ]
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
def test_a_header_that_cannot_be_sent_is_refused(delays: DelayTasks, headers: Any) -> None:
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
