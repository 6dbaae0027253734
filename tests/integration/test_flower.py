"""Test Flower with a real worker: it shows each row as a task of its own, named by its tag."""

from __future__ import annotations

import html
import json
import re
import secrets
from typing import Any

import pytest
import requests

from delaytasks import DelayedTask, Status
from tests.doc_pages import block_beginning
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TAGS = {"test.note", "test.fail", "test.sleep"}
HOSTILE = "<script>document.title = 'owned'</script>"


class FlowerSite(Deployment):
    """Flower and a worker on a broker that other tests use too, under names of their own."""

    url = ""

    def page(self, path: str) -> str:
        answer = requests.get(f"{self.url}{path}", timeout=10)
        return answer.text if answer.status_code != 404 else "{}"

    def info(self, task: DelayedTask) -> dict[str, Any]:
        """Return Flower's data of the first attempt, or `{}` if Flower has none yet."""
        found: dict[str, Any] = json.loads(self.page(f"/api/task/info/{task.id}-1"))
        return found

    def shown(self, state: str, task: DelayedTask, deadline_s: float = 20) -> dict[str, Any]:
        """Return Flower's data of a task as soon as it has this state."""

        def has_state() -> bool:
            return self.info(task).get("state") == state

        what = lambda: f"{state} {task.tag}: {self.info(task)}\n{self.logs()}"  # noqa: E731
        wait_until(has_state, deadline_s, what, every_s=0.02)
        return self.info(task)

    def switch(self, state: str) -> None:
        """Switch the events of the worker by `celery control`."""
        worker = self.node(1)
        said = self.command("control", f"{state}_events", "-d", worker, "-t", "10").log()
        assert f"task events {state}d" in said, said

    def run_one(self) -> DelayedTask:
        task = self.schedule()
        self.wait_for([task])
        return task


def test_each_row_is_a_task_named_by_its_tag(deploy: Deploy) -> None:
    # Flower switches on the events of all workers that receive its command. The exchanges of this
    # test are its own, so the workers of other tests do not receive it.
    own = "t" + secrets.token_hex(4)
    conf: dict[str, Any] = {"event_exchange": f"{own}.ev", "control_exchange": f"{own}.control"}
    conf |= {"task_send_sent_event": True}
    site = deploy("postgresql", "redis", conf, kind=FlowerSite, namespace=own, _self_sweep_s=60)
    site.url = site.flower("--enable-events=False")
    site.worker()
    name = site.node(1)
    wait_until(lambda: name in site.page("/workers?json=1"), 20, "Flower to see the worker")
    unseen = site.run_one()
    site.switch("enable")
    site.beat()  # Flower does not show its sweeps

    long = site.schedule("test.sleep", 0, body={"seconds": 3})
    task = site.schedule("test.note", 1, key="the-key", body={"order": 7})
    running = site.shown("STARTED", long, deadline_s=3)
    assert (running["name"], running["succeeded"]) == ("test.sleep", None)
    info = site.shown("SUCCESS", task)
    assert json.loads(info["args"]) == {"file": str(site.file), "order": 7}
    wanted = {
        "name": "test.note", "uuid": f"{task.id}-1", "worker": name, "exception": None,
        "kwargs": f"{{'id': '{task.id}', 'attempt': 1, 'key': 'the-key'}}",
        "eta": task.expected_time.isoformat(), "routing_key": "default",
    }  # fmt: skip
    assert info == info | wanted
    due = task.expected_time.timestamp()
    assert due <= info["received"] <= info["started"] <= info["succeeded"] < due + 10
    assert 0 < info["runtime"] < 5
    assert site.shown("SUCCESS", long)["runtime"] == pytest.approx(3, abs=0.5)

    failing = site.schedule("test.fail", 0, body={"text": HOSTILE, "words": HOSTILE})
    info = site.shown("FAILURE", failing)
    assert (info["name"], info["exception"]) == ("test.fail", f"ValueError({HOSTILE!r})")
    assert 'in fail\n    raise ValueError(body.get("text", "as asked"))' in info["traceback"]
    page = site.page(f"/task/{failing.id}-1")
    assert html.escape(HOSTILE) in page
    assert HOSTILE not in page

    before = site.counted()[Status.DONE]
    site.insert(in_s=3)  # only a sweep of beat finds this row
    wait_until(lambda: site.counted()[Status.DONE] > before, 20, site.logs, every_s=0.1)
    tasks = json.loads(site.page("/api/tasks?limit=10000"))
    assert {each["name"] for each in tasks.values()} == TAGS
    metrics = site.page("/metrics")
    assert "delaytasks." not in metrics
    assert set(re.findall(r'[,{]task="([^"]*)"', metrics)) <= TAGS | {""}
    for line in block_beginning("docs/monitor.md", "flower_events_total").text.splitlines():
        series = line.replace("order.close", "test.note").replace("celery@shop-1", name)
        assert f"\n{series.rpartition(' ')[0]} " in metrics, line
    [worker] = json.loads(site.page("/workers?json=1"))["data"]
    assert (worker["hostname"], worker["status"]) == (name, True)

    site.switch("disable")
    also_unseen = site.run_one()
    site.switch("enable")
    # Events arrive in order, so all events of earlier tasks have arrived when this one has.
    site.shown("SUCCESS", site.run_one())
    assert [site.info(one) for one in (unseen, also_unseen)] == [{}, {}]
