"""Test Flower with a real worker: it shows each row as a task of its own, named by its tag."""

from __future__ import annotations

import html
import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from sqlalchemy import insert

from delaytasks import DelayedTask, Status
from delaytasks.runtime import runtime_of
from delaytasks.storage.types import db_now_plus
from tests.doc_pages import block_beginning
from tests.running import ROOT, Deployment, delete_keys
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TAGS = {"test.note", "test.fail", "test.sleep", "test.abort", "test.nobody", "test.quiet"}
HOSTILE = "<script>document.title = 'owned'</script>"


class FlowerSite:
    """Run Flower and a worker that sends events.

    Both use a broker server that other tests use too, under names of their own.
    """

    def __init__(
        self,
        folder: Path,
        database_url: str,
        broker_url: str,
        conf: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self.token = "t" + secrets.token_hex(4)
        # Flower switches on the events of all workers that receive its command. The exchanges of
        # this test are its own, so the workers of other tests do not receive it.
        own = {"event_exchange": f"{self.token}.ev", "control_exchange": f"{self.token}.control"}
        self.deployment = Deployment(
            folder, database_url, broker_url, {**own, **(conf or {})}, **settings
        )
        self.url = ""
        #: Holds the name of the worker, even if Flower starts before the worker.
        self.worker = self.deployment.node(1)

    def get(self, path: str, **parameters: Any) -> Any:
        answer = requests.get(f"{self.url}{path}", params=parameters, timeout=10)
        answer.raise_for_status()
        return answer.json()

    def page(self, path: str) -> str:
        return requests.get(f"{self.url}{path}", timeout=10).text

    def info(self, task: DelayedTask, attempt: int = 1) -> dict[str, Any]:
        """Return Flower's data of one attempt, or `{}` if Flower has none yet."""
        answer = requests.get(f"{self.url}/api/task/info/{task.id}-{attempt}", timeout=10)
        if answer.status_code == 404:
            return {}
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def wait_for(
        self, state: str, task: DelayedTask, attempt: int = 1, deadline_s: float = 20
    ) -> dict[str, Any]:
        def found() -> dict[str, Any] | None:
            info = self.info(task, attempt)
            return info if info.get("state") == state else None

        what = f"Flower to show {task.tag} as {state}"
        try:
            return wait_until(found, deadline_s, what, every_s=0.02) or {}
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{self.info(task, attempt)}\n{self.deployment.logs()}"
            ) from None

    def online(self) -> dict[str, Any]:
        """Return Flower's workers by name."""
        return {worker["hostname"]: worker for worker in self.get("/workers", json=1)["data"]}

    def close(self) -> None:
        with runtime_of(self.deployment.delays).celery.connection_for_write() as connection:
            if connection.transport.driver_type == "amqp":
                for name in ("ev", "control.pidbox"):
                    connection.default_channel.exchange_delete(f"{self.token}.{name}")
                connection.default_channel.exchange_delete(f"reply.{self.token}.control.pidbox")
            delete_keys(connection, self.token)
        self.deployment.close()


@contextmanager
def a_site(
    request: pytest.FixtureRequest, folder: Path, broker: str, **settings: Any
) -> Iterator[FlowerSite]:
    database_url = request.getfixturevalue("postgresql_url")
    site = FlowerSite(folder, database_url, request.getfixturevalue(f"{broker}_url"), **settings)
    try:
        yield site
    finally:
        site.close()


@pytest.fixture(scope="module", params=[pytest.param("redis", marks=pytest.mark.quick), "rabbitmq"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FlowerSite]:
    with a_site(
        request, tmp_path_factory.mktemp("flower"), request.param, max_lost_leases=2
    ) as site:
        site.url = site.deployment.flower()
        site.deployment.worker("-E")
        yield site


@pytest.fixture
def make_site(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., FlowerSite]]:
    made: list[Any] = []

    def make(broker: str = "redis", **settings: Any) -> FlowerSite:
        context = a_site(request, tmp_path, broker, **settings)
        made.append(context)
        return context.__enter__()

    yield make
    for context in made:
        context.__exit__(None, None, None)


# -- the API --------------------------------------------------------------------------------------


def test_each_row_is_a_task_named_by_its_tag(site: FlowerSite) -> None:
    d = site.deployment
    task = d.schedule("test.note", 1, key="the-key", body={"order": 7})
    info = site.wait_for("SUCCESS", task)
    row = d.delays.get(task)
    assert row.status is Status.DONE
    assert info["name"] == "test.note"
    assert info["uuid"] == f"{task.id}-1"
    assert json.loads(info["args"]) == {"file": str(d.file), "order": 7}
    assert info["kwargs"] == f"{{'id': '{task.id}', 'attempt': 1, 'key': 'the-key'}}"
    assert info["worker"] == site.worker
    assert (row.worker or "").startswith(site.worker + "/")
    assert (
        task.expected_time.timestamp() <= info["received"] <= info["started"] <= info["succeeded"]
    )
    assert info["succeeded"] < task.expected_time.timestamp() + 10
    assert 0 < info["runtime"] < 5
    assert info["eta"] == task.expected_time.isoformat()
    assert info["routing_key"] == "default"
    assert info["exception"] is None


def test_a_failed_row_shows_its_error(site: FlowerSite) -> None:
    d = site.deployment
    task = d.schedule("test.fail", 0, body={"text": HOSTILE, "words": HOSTILE})
    info = site.wait_for("FAILURE", task)
    assert d.status(task) is Status.FAILED
    assert info["name"] == "test.fail"
    assert info["exception"] == f"ValueError({HOSTILE!r})"
    assert 'in fail\n    raise ValueError(body.get("text", "as asked"))' in info["traceback"]
    assert info["traceback"].rstrip().endswith(f"ValueError: {HOSTILE}")
    page = site.page(f"/task/{task.id}-1")
    assert html.escape(HOSTILE) in page
    assert HOSTILE not in page
    assert re.search(r'class="badge text-bg-danger">\s*FAILURE', page)


def test_a_long_task_is_shown_while_it_runs(site: FlowerSite) -> None:
    d = site.deployment
    task = d.schedule("test.sleep", 0, body={"seconds": 3})
    info = site.wait_for("STARTED", task, deadline_s=3)
    assert info["name"] == "test.sleep"
    assert info["succeeded"] is None
    assert d.status(task) is Status.RUNNING
    assert site.wait_for("SUCCESS", task)["runtime"] == pytest.approx(3, abs=0.5)


def test_the_messages_that_start_chunks_are_not_shown(site: FlowerSite) -> None:
    site.wait_for("SUCCESS", site.deployment.schedule())
    tasks = site.get("/api/tasks", limit=10_000)
    assert {"test.note"} <= {task["name"] for task in tasks.values()} <= TAGS
    metrics = site.page("/metrics")
    assert "delaytasks." not in metrics


def test_the_sweeps_of_beat_are_not_shown_even_if_sent_tasks_are(
    make_site: Callable[..., FlowerSite],
) -> None:
    site = make_site(conf={"task_send_sent_event": True}, _self_sweep_s=60)
    site.url = site.deployment.flower()
    site.deployment.beat()
    site.deployment.worker("-E")
    # Only a sweep finds this row.
    with site.deployment.store.database.begin() as connection:
        row = {"tag": "test.note", "message_body": f'{{"file": "{site.deployment.file}"}}'}
        connection.execute(
            insert(site.deployment.store.schema.tasks).values(**row, expected_time=db_now_plus(3))
        )
    found = wait_until(lambda: site.get("/api/tasks"), 20, "the row to be seen", every_s=0.1)
    assert {task["name"] for task in found.values()} == {"test.note"}


def test_the_metrics_have_the_tag_and_no_ids(site: FlowerSite) -> None:
    task = site.deployment.schedule()
    site.wait_for("SUCCESS", task)
    metrics = site.page("/metrics")
    labels = set(re.findall(r'[,{]task="([^"]*)"', metrics))
    assert {"test.note"} <= labels <= TAGS | {""}
    count = (
        r'flower_events_total\{task="test.note",type="task-succeeded",worker="WORKER"\} [1-9]'
    ).replace("WORKER", site.worker)
    assert re.search(count, metrics), metrics
    for line in block_beginning("docs/flower.md", "flower_events_total").text.splitlines():
        series = line.replace("order.close", "test.note").replace("celery@shop-1", site.worker)
        assert f"\n{series.rpartition(' ')[0]} " in metrics, line
    assert str(task.id) not in metrics


def test_the_worker_is_online_with_its_counts(site: FlowerSite) -> None:
    site.wait_for("SUCCESS", site.deployment.schedule())
    site.wait_for("FAILURE", site.deployment.schedule("test.fail"))
    worker = site.online()[site.worker]
    assert worker["status"] is True
    assert worker["task-received"] >= worker["task-succeeded"] + worker["task-failed"] - 1
    assert worker["task-succeeded"] >= 1
    assert worker["task-failed"] >= 1
    assert site.worker in site.page(f"/worker/{site.worker}")


# -- docs/flower.md -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broker", "pool"), [("redis", "prefork"), ("rabbitmq", "threads"), ("redis", "solo")]
)
def test_celery_control_switches_the_events_of_rows_on_and_off(
    make_site: Callable[..., FlowerSite], broker: str, pool: str
) -> None:
    site = make_site(broker)
    d = site.deployment
    d.worker(pool=pool)
    site.url = d.flower("--enable-events=False")
    wait_until(lambda: d.node(0) in site.online(), 20, "Flower to see the worker")

    def run_one() -> DelayedTask:
        task = d.schedule()
        d.wait_for([task])
        return task

    def switch(state: str) -> None:
        said = d.command("control", f"{state}_events", "-d", d.node(0), "-t", "10").log()
        assert f"task events {state}d" in said, said

    unseen = run_one()
    switch("enable")
    seen = run_one()
    site.wait_for("SUCCESS", seen)
    switch("disable")
    also_unseen = run_one()
    switch("enable")
    # Events arrive in order, so all events of earlier tasks have arrived when this one has.
    site.wait_for("SUCCESS", run_one())
    assert [bool(site.info(task)) for task in (unseen, seen, also_unseen)] == [False, True, False]


def test_flower_is_protected_as_documented(
    make_site: Callable[..., FlowerSite], tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "flower.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [config] = [block for block in blocks if "format_task" in block]
    (tmp_path / "flowerconfig.py").write_text(config)
    site = make_site()
    site.url = site.deployment.flower("--basic-auth=ann:secret", "--read_only")
    site.deployment.worker("-E")
    task = site.deployment.schedule("test.quiet", 0, body={"word": "canary"})
    task_page = f"/task/{task.id}-1"

    def get(path: str) -> requests.Response:
        return requests.get(site.url + path, auth=("ann", "secret"), timeout=10)

    page = wait_until(
        lambda: get(task_page) if get(task_page).ok else None, 20, "Flower to show the task"
    )
    assert page is not None
    assert "canary" not in page.text
    assert "(hidden)" in page.text
    assert "canary" in get("/api/tasks").text
    assert (
        requests.post(
            f"{site.url}/api/worker/shutdown/{site.worker}", auth=("ann", "secret"), timeout=10
        ).status_code
        == 403
    )
    for path in (task_page, "/tasks", "/", "/api/tasks", "/workers?json=1"):
        assert requests.get(site.url + path, timeout=10).status_code == 401, path
    for path in ("/metrics", "/healthcheck"):
        assert requests.get(site.url + path, timeout=10).ok, path
