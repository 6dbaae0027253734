"""Test Flower with a real worker: it shows each row as a task of its own, named by its tag."""

from __future__ import annotations

import html
import json
import re
import secrets
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests

from delaytasks import DelayedTask, Status
from delaytasks.runtime import runtime_of
from tests.doc_pages import block_beginning
from tests.integration.conftest import Deploy
from tests.running import Deployment, delete_keys
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TAGS = {"test.note", "test.fail", "test.sleep", "test.abort", "test.nobody", "test.quiet"}
HOSTILE = "<script>document.title = 'owned'</script>"


class FlowerSite(Deployment):
    """Flower and a worker that sends events.

    Both use a broker server that other tests use too, under names of their own.
    """

    def __init__(
        self, folder: Path, database: str, broker: str, conf: Any = None, **settings: Any
    ) -> None:
        self.token = "t" + secrets.token_hex(4)
        # Flower switches on the events of all workers that receive its command. The exchanges of
        # this test are its own, so the workers of other tests do not receive it.
        own = {"event_exchange": f"{self.token}.ev", "control_exchange": f"{self.token}.control"}
        super().__init__(folder, database, broker, {**own, **(conf or {})}, **settings)
        self.url = ""
        #: Holds the name of the worker, even if Flower starts before the worker.
        self.worker_name = self.node(1)

    def start(self) -> FlowerSite:
        """Start Flower, a worker, and a beat, whose sweeps Flower should not show."""
        self.url = self.flower()
        self.worker("-E")
        self.beat()
        return self

    def get(self, path: str, **parameters: Any) -> Any:
        answer = requests.get(f"{self.url}{path}", params=parameters, timeout=10)
        answer.raise_for_status()
        return answer.json()

    def page(self, path: str) -> str:
        return requests.get(f"{self.url}{path}", timeout=10).text

    def info(self, task: DelayedTask) -> dict[str, Any]:
        """Return Flower's data of the first attempt, or `{}` if Flower has none yet."""
        answer = requests.get(f"{self.url}/api/task/info/{task.id}-1", timeout=10)
        if answer.status_code == 404:
            return {}
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def shown(self, state: str, task: DelayedTask, deadline_s: float = 20) -> dict[str, Any]:
        """Return Flower's data of a task as soon as it has this state."""

        def found() -> dict[str, Any] | None:
            info = self.info(task)
            return info if info.get("state") == state else None

        what = lambda: f"{state} {task.tag}: {self.info(task)}\n{self.logs()}"  # noqa: E731
        return wait_until(found, deadline_s, what, every_s=0.02) or {}

    def online(self) -> dict[str, Any]:
        """Return Flower's workers by name."""
        return {worker["hostname"]: worker for worker in self.get("/workers", json=1)["data"]}

    def close(self) -> None:
        with runtime_of(self.delays).celery.connection_for_write() as connection:
            if connection.transport.driver_type == "amqp":
                for name in (".ev", ".control.pidbox"):
                    connection.default_channel.exchange_delete(f"{self.token}{name}")
                connection.default_channel.exchange_delete(f"reply.{self.token}.control.pidbox")
            delete_keys(connection, self.token)
        super().close()


@pytest.fixture(scope="module", params=["redis", "rabbitmq"])
def site(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlowerSite]:
    urls = ("postgresql_url", f"{request.param}_url")
    database, broker = map(request.getfixturevalue, urls)
    folder, conf = tmp_path_factory.mktemp("flower"), {"task_send_sent_event": True}
    settings = {"max_lost_leases": 2, "_self_sweep_s": 60}
    with closing(FlowerSite(folder, database, broker, conf, **settings)) as site:
        yield site.start()


# -- the API --------------------------------------------------------------------------------------


def test_each_row_is_a_task_named_by_its_tag(site: FlowerSite) -> None:
    long = site.schedule("test.sleep", 0, body={"seconds": 3})
    task = site.schedule("test.note", 1, key="the-key", body={"order": 7})
    running = site.shown("STARTED", long, deadline_s=3)
    assert (running["name"], running["succeeded"]) == ("test.sleep", None)
    info = site.shown("SUCCESS", task)
    row = site.delays.get(task)
    assert row.status is Status.DONE
    assert info["name"] == "test.note"
    assert info["uuid"] == f"{task.id}-1"
    assert json.loads(info["args"]) == {"file": str(site.file), "order": 7}
    assert info["kwargs"] == f"{{'id': '{task.id}', 'attempt': 1, 'key': 'the-key'}}"
    assert info["worker"] == site.worker_name
    assert (row.worker or "").startswith(site.worker_name + "/")
    due = task.expected_time.timestamp()
    assert due <= info["received"] <= info["started"] <= info["succeeded"] < due + 10
    assert 0 < info["runtime"] < 5
    assert info["eta"] == task.expected_time.isoformat()
    assert info["routing_key"] == "default"
    assert info["exception"] is None
    assert site.shown("SUCCESS", long)["runtime"] == pytest.approx(3, abs=0.5)


def test_a_failed_row_shows_its_error(site: FlowerSite) -> None:
    task = site.schedule("test.fail", 0, body={"text": HOSTILE, "words": HOSTILE})
    info = site.shown("FAILURE", task)
    assert site.status(task) is Status.FAILED
    assert info["name"] == "test.fail"
    assert info["exception"] == f"ValueError({HOSTILE!r})"
    assert 'in fail\n    raise ValueError(body.get("text", "as asked"))' in info["traceback"]
    assert info["traceback"].rstrip().endswith(f"ValueError: {HOSTILE}")
    page = site.page(f"/task/{task.id}-1")
    assert html.escape(HOSTILE) in page
    assert HOSTILE not in page
    assert re.search(r'class="badge text-bg-danger">\s*FAILURE', page)


def test_tasks_metrics_and_the_worker_are_shown_without_messages_and_ids(site: FlowerSite) -> None:
    task = site.schedule()
    site.shown("SUCCESS", task)
    site.shown("FAILURE", site.schedule("test.fail"))
    before = site.counted()[Status.DONE]
    site.insert(in_s=3)  # only a sweep of beat finds this row
    wait_until(lambda: site.counted()[Status.DONE] > before, 20, site.logs, every_s=0.1)
    tasks = site.get("/api/tasks", limit=10_000)
    assert {"test.note"} <= {task["name"] for task in tasks.values()} <= TAGS
    metrics = site.page("/metrics")
    assert "delaytasks." not in metrics
    labels = set(re.findall(r'[,{]task="([^"]*)"', metrics))
    assert {"test.note"} <= labels <= TAGS | {""}
    for line in block_beginning("docs/monitor.md", "flower_events_total").text.splitlines():
        series = line.replace("order.close", "test.note").replace("celery@shop-1", site.worker_name)
        assert f"\n{series.rpartition(' ')[0]} " in metrics, line
    assert str(task.id) not in metrics
    worker = site.online()[site.worker_name]
    assert worker["status"] is True
    assert min(worker["task-succeeded"], worker["task-failed"]) >= 1


# -- docs/monitor.md -----------------------------------------------------------------------------


@pytest.mark.parametrize(("broker", "pool"), [("redis", "prefork"), ("rabbitmq", "threads")])
def test_celery_control_switches_the_events_of_rows(deploy: Deploy, broker: str, pool: str) -> None:
    site = deploy("postgresql", broker, kind=FlowerSite)
    site.worker(pool=pool)
    site.url = site.flower("--enable-events=False")
    wait_until(lambda: site.node(0) in site.online(), 20, "Flower to see the worker")

    def run_one() -> DelayedTask:
        task = site.schedule()
        site.wait_for([task])
        return task

    def switch(state: str) -> None:
        said = site.command("control", f"{state}_events", "-d", site.node(0), "-t", "10").log()
        assert f"task events {state}d" in said, said

    unseen = run_one()
    switch("enable")
    seen = run_one()
    site.shown("SUCCESS", seen)
    switch("disable")
    also_unseen = run_one()
    switch("enable")
    # Events arrive in order, so all events of earlier tasks have arrived when this one has.
    site.shown("SUCCESS", run_one())
    assert [bool(site.info(task)) for task in (unseen, seen, also_unseen)] == [False, True, False]
