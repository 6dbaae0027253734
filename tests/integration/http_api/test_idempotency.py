"""Requests with the same Idempotency-Key schedule one task, also if they are simultaneous."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

from delaytasks.http_api.routes import ROUTES
from tests.integration.http_api.conftest import ApiCaller, ApiSite
from tests.running import ROOT

NEW = {"tag": "order.close", "body": {"order": 7}, "delay": 0}


def post(caller: ApiCaller, body: Any = NEW, key: str = "a") -> Any:
    return caller.json("POST", "/v1/tasks", body, Idempotency_Key=key)


def run_all(site: ApiSite) -> None:
    while site.delays.runner().run_due("default", range(10), limit=100).ran:
        pass


def test_a_repeated_request_schedules_nothing_also_after_the_task_has_run(
    site: ApiSite, shop: ApiCaller
) -> None:
    site.delays.processor("order.close")(lambda body: None)
    first = post(shop)
    assert post(shop)["version"] == first["version"]
    run_all(site)
    again = post(shop)
    assert (again["id"], again["status"]) == (first["id"], "DONE")
    assert len(site.delays.find()) == 1
    assert post(shop, key="b")["id"] != first["id"]
    assert post(site.caller("schedule:*"))["id"] != first["id"], "another caller"


def test_another_request_with_the_same_key_is_refused(site: ApiSite, shop: ApiCaller) -> None:
    post(shop)
    other = shop("POST", "/v1/tasks", {**NEW, "body": {"order": 8}}, Idempotency_Key="a")
    assert other.status_code == 422
    assert len(site.delays.find()) == 1


def test_simultaneous_requests_schedule_one_task(site: ApiSite, shop: ApiCaller) -> None:
    barrier = Barrier(4)

    def request(_: int) -> str:
        barrier.wait(10)
        id: str = post(shop)["id"]
        return id

    with ThreadPoolExecutor(4) as threads:
        ids = set(threads.map(request, range(4)))
    assert len(ids) == len(site.delays.find()) == 1


def test_a_key_in_the_request_goes_without_the_header(shop: ApiCaller) -> None:
    refused = (400, "InvalidRequestError")
    named = {**NEW, "key": "7"}
    assert shop.problem("POST", "/v1/tasks", named, Idempotency_Key="a") == refused


def test_a_caller_cannot_plant_the_task_of_another_request(site: ApiSite, shop: ApiCaller) -> None:
    key = post(shop)["key"]
    run_all(site)
    planted = {**NEW, "key": key}
    other = site.caller("schedule:*")
    assert other.problem("POST", "/v1/tasks", planted) == (400, "InvalidRequestError")


def test_too_long_a_key_is_refused(shop: ApiCaller) -> None:
    answer = shop.problem("POST", "/v1/tasks", NEW, Idempotency_Key="k" * 256)
    assert answer == (400, "InvalidRequestError")


def test_other_routes_refuse_the_header(shop: ApiCaller) -> None:
    answer = shop.problem("GET", "/v1/tasks", Idempotency_Key="a")
    assert answer == (400, "InvalidRequestError")


def test_the_docs_name_the_routes_that_take_the_header() -> None:
    section = (ROOT / "docs/http-api.md").read_text().partition("## Repeated requests\n")[2]
    sentence = section.partition("The routes that schedule take the header:")[2].partition(".")[0]
    expected = [f"{each.method} {each.path}" for each in ROUTES if each.takes_idempotency_key]
    assert re.findall("`(.+?)`", sentence) == expected
