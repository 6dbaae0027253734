"""Pages of tasks, the problems of errors, and repeated requests.

`tests/integration/test_faces.py` has the effect of each route.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any
from unittest.mock import Mock

import pytest

from delaytasks import DelayTasks, OutcomeUnknownError, StoreUnavailableError
from delaytasks.http_api.routes import ROUTES, make_api
from tests.integration.http_api.conftest import ApiCaller, ApiSite
from tests.running import ROOT
from tests.world.recording import runner_of

FAR = "2035-01-01T00:00:00Z"


def test_tasks_are_found_by_pages(shop: ApiCaller) -> None:
    ids = [shop.json("POST", "/v1/tasks", {"tag": "mail", "at": FAR})["id"] for _ in range(5)]
    since = "since=2034-12-31t23:59:59.123456789Z"
    first = shop.json("GET", f"/v1/tasks?tag=mail&limit=3&{since}")
    second = shop.json("GET", f"/v1/tasks?tag=mail&limit=3&cursor={first['cursor']}")
    assert [task["id"] for task in first["tasks"] + second["tasks"]] == ids
    assert second["cursor"] is None


# -- errors ---------------------------------------------------------------------------------------


def test_each_error_is_a_problem_with_its_status(shop: ApiCaller) -> None:
    for values, argument in (({"delay": True}, "delay"), ({"delay": 1, "prio": 1}, "prio")):
        assert shop.problem("POST", "/v1/tasks", {"tag": "mail", **values}) == (400, argument)
    assert shop.problem("GET", "/v1/tasks?tga=mail") == (400, "tga")
    inside = {"url": "https://169.254.169.254/latest", "delay": 60}
    assert shop.problem("POST", "/v1/callbacks", inside) == (400, "ForbiddenURLError")
    assert shop.problem("GET", "/v2") == (404, "about:blank")
    wrong_method = shop("DELETE", "/v1/tasks")
    assert wrong_method.status_code == 405
    assert set(wrong_method.headers["Allow"].split(", ")) == {"GET", "HEAD", "POST"}


TASK, JSON = b'{"tag": "a", "delay": 1, "body": %s}', "application/json"


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        *((data, JSON, 400) for data in (TASK % b"NaN", b"\xff", b"", b"9" * 5000, b"[" * 100_000)),
        (TASK % (b"[" * 500 + b"]" * 500), JSON, 400),
        (TASK % b"1", "text/plain", 415),
        (b" " * 2000, JSON, 413),
        (TASK % b'"%s"' % (b"x" * 300_000), JSON, 413),
    ],
)
def test_a_body_without_json_is_refused(site: ApiSite, data: bytes, kind: str, status: int) -> None:
    key, _ = site.keys.create("shop", ["schedule:*"])
    most = 1000 if data.isspace() else 400_000
    app = make_api(site.delays, site.keys)
    app.config["MAX_CONTENT_LENGTH"], client = most, app.test_client()
    headers = {"Authorization": f"Bearer {key}"}
    answer = client.post("/v1/tasks", data=data, content_type=kind, headers=headers)
    assert (answer.status_code, answer.content_type) == (status, "application/problem+json")
    assert len(site.delays.find()) == 0


def test_a_failing_database_and_a_bug_are_problems_without_secrets(
    shop: ApiCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Mock()
    monkeypatch.setattr(DelayTasks, "get", failing)
    for error, status in (
        (StoreUnavailableError("no answer"), 503),
        (OutcomeUnknownError("cut", 7), 504),
        (RuntimeError("postgresql://ann:secret@db"), 500),
    ):
        failing.side_effect = error
        answer = shop("GET", "/v1/tasks/7")
        assert (answer.status_code, answer.content_type) == (status, "application/problem+json")
        assert "secret" not in answer.text
        assert ("Retry-After" in answer.headers) is (status != 500)


# -- Requests with the same Idempotency-Key schedule one task, also if they are simultaneous ------


NEW_ORDER = {"tag": "order.close", "body": {"order": 7}, "delay": 0}


def post(caller: ApiCaller, body: Any = NEW_ORDER, key: str = "a") -> Any:
    return caller.json("POST", "/v1/tasks", body, Idempotency_Key=key)


def run_all(site: ApiSite) -> None:
    while runner_of(site.delays).run_due("default", range(10), limit=100).ran:
        pass


def test_a_repeated_request_schedules_nothing_even_later(site: ApiSite, shop: ApiCaller) -> None:
    site.delays.processor("order.close")(lambda body: None)
    first = post(shop)
    other = shop("POST", "/v1/tasks", {**NEW_ORDER, "body": {"order": 8}}, Idempotency_Key="a")
    assert other.status_code == 422, "another request with the same key"
    assert post(shop)["version"] == first["version"]
    run_all(site)
    again = post(shop)
    assert (again["id"], again["status"]) == (first["id"], "DONE")
    assert len(site.delays.find()) == 1
    assert post(shop, key="b")["id"] != first["id"]
    assert post(site.caller("schedule:*"))["id"] != first["id"], "another caller"


def test_simultaneous_requests_schedule_one_task(site: ApiSite, shop: ApiCaller) -> None:
    barrier = Barrier(4)

    def request(_: int) -> str:
        barrier.wait(10)
        id: str = post(shop)["id"]
        return id

    with ThreadPoolExecutor(4) as threads:
        ids = set(threads.map(request, range(4)))
    assert len(ids) == len(site.delays.find()) == 1


def test_a_header_that_cannot_be_used_is_refused(site: ApiSite, shop: ApiCaller) -> None:
    key = post(shop)["key"]
    run_all(site)
    planted, named = {**NEW_ORDER, "key": key}, {**NEW_ORDER, "key": "7"}
    # Another caller cannot plant the task of this request.
    assert site.caller("schedule:*").problem("POST", "/v1/tasks", planted) == (400, "key")
    assert shop.problem("POST", "/v1/tasks", named, Idempotency_Key="a") == (400, "key")
    refused = (400, "Idempotency-Key")
    assert shop.problem("POST", "/v1/tasks", NEW_ORDER, Idempotency_Key="k" * 256) == refused


def test_the_docs_name_the_routes_that_take_the_header() -> None:
    section = (ROOT / "docs/callbacks.md").read_text().partition("## Repeated requests\n")[2]
    sentence = section.partition("The routes that schedule take the header:")[2].partition(".")[0]
    expected = [f"{each.method} {each.path}" for each in ROUTES if each.takes_idempotency_key]
    assert re.findall("`(.+?)`", sentence) == expected
