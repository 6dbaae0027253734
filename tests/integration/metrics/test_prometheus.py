"""A real Prometheus scrapes real workers and an exporter, and evaluates dashboard and rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from delaytasks.metrics.files import NAMES, read_file
from delaytasks.metrics.process import ProducerMetrics
from delaytasks.metrics.prometheus import MetricsServer, serve
from tests.integration.metrics.prometheus_server import PrometheusServer
from tests.running import Deployment
from tests.services import MissingServiceError, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
#: Expressions about the timer `redis` have a test of their own.
REDIS_TIMER = "delaytasks_redis_timer_"
JOBS = ("prefork", "threads", "exporter", "producer")


class ScrapedSite:
    def __init__(self, folder: Path, database_url: str, broker_url: str, **settings: Any) -> None:
        self.deployment = Deployment(folder, database_url, broker_url, **settings)
        self.ports = {job: free_port() for job in JOBS}
        self._producer: MetricsServer | None = None
        rules = folder / NAMES["rules"]
        rules.write_text(read_file("rules"))
        try:
            self.prometheus = PrometheusServer(folder, self.ports, rules)
        except MissingServiceError as error:
            self.deployment.close()
            pytest.skip(f"needs prometheus: {error}")

    def start(self) -> None:
        metrics = ProducerMetrics.of(self.deployment.delays)
        self._producer = serve("127.0.0.1", self.ports["producer"], metrics)
        self.deployment.beat()
        for pool in ("prefork", "threads"):
            self.deployment.worker(pool=pool, DELAYTASKS_METRICS=str(self.ports[pool]))
        self.export()

    def export(self) -> None:
        command = ["serve", "--metrics", str(self.ports["exporter"])]
        exporter = self.deployment.python("exporter", "delaytasks", *command)
        wait_until(lambda: "metrics at" in exporter.log(), 30, exporter.log, every_s=0.1)

    def expect_result(self, expression: str, what: str) -> None:
        """Wait until an expression has a result. A rate needs two scrapes.

        A comparison has one whatever it says: with `bool` it is 0 or 1.
        """
        compared = re.sub(r"==|[<>]", r"\g<0> bool", expression)
        has_result = partial(self.prometheus.query, compared)
        wait_until(has_result, 30, f"a result of {what}: {compared}", every_s=0.3)
        known = set(self.prometheus.get("label/__name__/values"))
        assert set(re.findall(r"delaytasks_\w+", expression)) <= known, what

    def close(self) -> None:
        if self._producer is not None:
            self._producer.stop()
        self.prometheus.stop()
        self.deployment.close()


@pytest.fixture
def site(tmp_path: Path, postgresql_url: str, redis_url: str) -> Iterator[ScrapedSite]:
    made = ScrapedSite(tmp_path, postgresql_url, redis_url)
    yield made
    made.close()


@pytest.fixture
def redis_timer_site(tmp_path: Path, postgresql_url: str, redis_url: str) -> Iterator[ScrapedSite]:
    settings = {"timer": redis_url, "horizon": 120}
    made = ScrapedSite(tmp_path, postgresql_url, redis_url, **settings)
    yield made
    made.close()


def is_used(expression: str) -> bool:
    """Return whether the deployment of the first test has these metrics."""
    return REDIS_TIMER not in expression


def expressions_of_dashboard() -> list[tuple[str, str]]:
    """Return the title and the expression of each query, with values for its variables."""
    document = json.loads(read_file("dashboard"))
    found = []
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "1m")
            found.append((panel["title"], text.replace("$tag", ".*")))
    return found


def test_every_expression_of_dashboard_and_rules_has_a_result(site: ScrapedSite) -> None:
    d, prometheus = site.deployment, site.prometheus
    d.schedule("test.quiet", 3600)  # the first forecast has this peak
    site.start()
    followers = []

    def is_counted(query: str, number: int) -> bool:
        """A process reports the rows that it settles last with its next chunk: let one follow."""
        if prometheus.value(query) != number:
            followers.append(d.schedule("test.note"))
        return prometheus.value(query) == number

    unserved = d.schedule("test.quiet", queue="nobody")
    tasks = [d.schedule("test.quiet") for _ in range(30)]
    d.wait_for([*tasks, d.schedule("test.prompt")])
    for _ in range(7):
        d.schedule("test.fail")
    failed = 'sum(delaytasks_runs_total{tag="test.fail",outcome="failed"})'
    wait_until(partial(is_counted, failed, 7), 60, d.logs, every_s=1)

    # The numbers of both workers are exact, with processes and with threads.
    done = 'sum(delaytasks_runs_total{tag="test.quiet",outcome="done"})'
    wait_until(partial(is_counted, done, 30), 30, d.logs, every_s=1)
    for kind in ("lateness", "duration"):
        count = f'sum(delaytasks_run_{kind}_seconds_count{{tag="test.quiet"}})'
        assert prometheus.value(count) == 30
        last = f'sum(delaytasks_run_{kind}_seconds_bucket{{tag="test.quiet",le="+Inf"}})'
        assert prometheus.value(last) == 30
    assert prometheus.value("sum(delaytasks_pool_processes)") == 4
    wait_until(
        lambda: prometheus.value('delaytasks_tasks{status="FAILED"}') == 7,
        60,
        "an exporter's scrape",
    )
    late = 'delaytasks_overdue_tasks_by_tag{queue="nobody"}'
    wait_until(lambda: prometheus.value(late) == 1, 60, "the late task", every_s=0.3)
    assert prometheus.value("delaytasks_workers") == 2
    assert prometheus.value("delaytasks_broker_up") == 1
    assert prometheus.value("sum(delaytasks_runs_on_time_total)") == 1
    scheduled = 'sum(delaytasks_scheduled_total{job="producer"})'
    wait_until(
        lambda: prometheus.value(scheduled) == 39 + len(followers),
        30,
        "the tasks scheduled since the start",
        every_s=0.3,
    )
    assert 0 < (prometheus.value("delaytasks_forecast_peak_utilization") or 0) < 1

    check_dashboard(site)
    check_rules(site)
    d.delays.cancel(unserved.id)


def check_dashboard(site: ScrapedSite) -> None:
    """Check that each query of the dashboard has a result."""
    expressions = expressions_of_dashboard()
    assert len(expressions) > 25
    for title, text in expressions:
        if is_used(text):
            site.expect_result(text, title)


def check_rules(site: ScrapedSite) -> None:
    """Check that each rule compares values that exist, and which alerts are active."""
    prometheus = site.prometheus

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    wait_until(
        lambda: all(rule["health"] == "ok" for rule in rules()), 30, lambda: str(rules()), every_s=1
    )
    assert len(rules()) == read_file("rules").count("- alert:")
    for rule in rules():
        if is_used(rule["query"]):
            site.expect_result(rule["query"], rule["name"])

    def active() -> set[str]:
        return {rule["name"] for rule in rules() if rule["state"] != "inactive"}

    wait_until(lambda: "DelayTasksQueueWithoutWorker" in active(), 30, lambda: str(rules()))
    # The task of the queue without a worker becomes late in the course of this test.
    assert active() <= {"DelayTasksQueueWithoutWorker", "DelayTasksFailing", "DelayTasksLate"}


def test_expressions_about_the_redis_timer_have_results(redis_timer_site: ScrapedSite) -> None:
    site = redis_timer_site
    site.start()
    d, prometheus = site.deployment, site.prometheus
    d.wait_for([d.schedule("test.quiet")])
    expressions = [one for one in expressions_of_dashboard() if REDIS_TIMER in one[1]]
    assert expressions
    for title, text in expressions:
        site.expect_result(text, title)
    assert prometheus.value("delaytasks_redis_timer_up") == 1
    task = d.schedule("test.quiet", 100)
    entries = "sum(delaytasks_redis_timer_entries)"
    wait_until(lambda: prometheus.value(entries) == 1, 60, d.logs, every_s=0.3)
    d.delays.cancel(task.id)


def test_without_workers_the_alert_about_them_is_pending(site: ScrapedSite) -> None:
    d, prometheus = site.deployment, site.prometheus
    site.export()
    task = d.schedule("test.quiet", queue="nobody")

    def alerts() -> set[str]:
        return {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}

    wanted = {"DelayTasksNoWorker", "DelayTasksQueueWithoutWorker", "DelayTasksSweepOld"}
    wait_until(lambda: wanted <= alerts(), 60, lambda: f"{alerts()}\n{d.logs()}", every_s=0.5)
    late = 'delaytasks_overdue_tasks_by_tag{queue="nobody"}'
    assert prometheus.value(late) == 1
    d.delays.cancel(task.id)


def test_a_worker_writes_its_metrics_to_a_file(
    tmp_path: Path, postgresql_url: str, redis_url: str
) -> None:
    d = Deployment(tmp_path, postgresql_url, redis_url)
    try:
        worker = d.worker(DELAYTASKS_METRICS=str(tmp_path / "%n.prom"))
        d.wait_for([d.schedule("test.quiet")])
        worker.terminate()
        [file] = tmp_path.glob("*.prom")
        assert 'delaytasks_runs_total{outcome="done",tag="test.quiet"} 1.0' in file.read_text()
    finally:
        d.close()


def test_a_worker_whose_port_is_in_use_runs_without_metrics(
    tmp_path: Path, postgresql_url: str, redis_url: str
) -> None:
    d, port = Deployment(tmp_path, postgresql_url, redis_url), str(free_port())
    try:
        first = d.worker(DELAYTASKS_METRICS=port)
        second = d.worker(DELAYTASKS_METRICS=port)
        wait_until(
            lambda: "metrics.not_served" in second.log(), 20, lambda: second.log(), every_s=0.1
        )
        assert "metrics.not_served" not in first.log()
        d.wait_for([d.schedule("test.quiet") for _ in range(5)])
    finally:
        d.close()
