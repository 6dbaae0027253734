"""Requests with the same Idempotency-Key schedule one task, also if they are simultaneous."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from delaytasks.http_api import idempotency
from delaytasks.http_api.routes import ROUTES
from tests.integration.http_api.conftest import ApiCaller, ApiSite
from tests.running import ROOT

NEW = {"tag": "order.close", "body": {"order": 7}, "delay": 0}


def post(caller: ApiCaller, body: Any = NEW, key: str = "a", path: str = "/v1/tasks") -> Any:
    return caller.json("POST", path, body, Idempotency_Key=key)


def run_all(site: ApiSite) -> None:
    while site.delays.runner().run_due("default", range(10), limit=100).ran:
        pass


@pytest.mark.parametrize("options", [{}, {"key": "7"}, {"key": "7", "on_conflict": "replace"}])
def test_a_repeated_request_schedules_nothing_also_after_the_task_has_run(
    site: ApiSite, shop: ApiCaller, options: dict[str, str]
) -> None:
    site.delays.processor("order.close")(lambda body: None)
    new = {**NEW, **options}
    first = post(shop, new)
    assert post(shop, new)["version"] == first["version"]
    run_all(site)
    again = post(shop, new)
    assert (again["id"], again["status"]) == (first["id"], "DONE")
    assert len(site.delays.find()) == 1
    assert post(shop, new, key="b")["id"] != first["id"]
    assert post(site.caller("schedule:*"), {**new, "key": "8"})["id"] != first["id"]


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


@pytest.mark.parametrize("options", [{}, {"key": "7"}])
def test_a_task_that_ends_between_the_lookup_and_the_insert_is_found(
    site: ApiSite, shop: ApiCaller, monkeypatch: pytest.MonkeyPatch, options: dict[str, str]
) -> None:
    site.delays.processor("order.close")(lambda body: None)
    first = post(shop, {**NEW, **options})
    run_all(site)
    looks = [idempotency._found]

    def found(*arguments: Any) -> Any:
        return looks[0](*arguments) if len(arguments) > 2 else None

    monkeypatch.setattr(idempotency, "_found", found)
    assert post(shop, {**NEW, **options})["id"] == first["id"]
    assert len(site.delays.find()) == 1


def test_a_repeated_batch_continues_where_the_first_one_ended(
    site: ApiSite, shop: ApiCaller
) -> None:
    tasks = [{**NEW, "body": number} for number in range(3)]
    taken = site.delays.schedule_delay("order.close", {}, 60, key="taken")
    batch = {"tasks": [*tasks[:2], {**NEW, "key": "taken"}, tasks[2]]}
    failed = shop("POST", "/v1/tasks/batch", batch, Idempotency_Key="a")
    assert failed.status_code == 409
    site.delays.cancel(taken)
    assert post(shop, batch, path="/v1/tasks/batch") == {"scheduled": 4}
    assert post(shop, batch, path="/v1/tasks/batch") == {"scheduled": 4}
    assert len(site.delays.find(status="NOT_COMPLETE")) == 4


def test_too_long_a_key_is_refused(shop: ApiCaller) -> None:
    answer = shop.problem("POST", "/v1/tasks", NEW, Idempotency_Key="k" * 256)
    assert answer == (400, "InvalidRequestError")


def test_other_routes_refuse_the_header(shop: ApiCaller) -> None:
    shop.json("PUT", "/v1/recurring/report", {"tag": "report", "every": "1h"})
    run = ("POST", "/v1/recurring/report/run")
    refused = (400, "InvalidRequestError")
    assert shop.problem(*run, Idempotency_Key="a") == refused
    assert shop.problem("GET", "/v1/tasks", Idempotency_Key="a") == refused
    assert shop.json(*run)["tag"] == "report"


def test_the_docs_name_the_routes_that_take_the_header() -> None:
    section = (ROOT / "docs/http-api.md").read_text().partition("## Repeated requests\n")[2]
    sentence = section.partition("The routes that schedule take the header:")[2].partition(".")[0]
    expected = [f"{each.method} {each.path}" for each in ROUTES if each.takes_idempotency_key]
    assert re.findall("`(.+?)`", sentence) == expected
