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
from tests.integration.metrics.prometheus_server import PrometheusServer
from tests.running import Deployment
from tests.services import MissingServiceError, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
#: Metrics of features that the deployment of these tests does not use.
ABSENT = {
    "delaytasks_partitions_end_seconds",
    "delaytasks_redis_timer_up",
    "delaytasks_runs_on_time_total",
    "delaytasks_runs_late_total",
}


class ScrapedSite:
    def __init__(self, folder: Path, database_url: str, redis_url: str) -> None:
        self.deployment = Deployment(folder, database_url, redis_url)
        self.ports = {"prefork": free_port(), "threads": free_port(), "exporter": free_port()}
        rules = folder / NAMES["rules"]
        rules.write_text(read_file("rules"))
        try:
            self.prometheus = PrometheusServer(folder, self.ports, rules)
        except MissingServiceError as error:
            self.deployment.close()
            pytest.skip(f"needs prometheus: {error}")

    def start(self) -> None:
        self.deployment.beat()
        for pool in ("prefork", "threads"):
            self.deployment.worker(pool=pool, DELAYTASKS_METRICS_PORT=str(self.ports[pool]))
        command = ["exporter", "--port", str(self.ports["exporter"])]
        exporter = self.deployment.python("exporter", "delaytasks", *command)
        wait_until(lambda: "metrics at" in exporter.log(), 30, exporter.log, every_s=0.1)

    def close(self) -> None:
        self.prometheus.stop()
        self.deployment.close()


@pytest.fixture
def site(tmp_path: Path, postgresql_url: str, redis_url: str) -> Iterator[ScrapedSite]:
    made = ScrapedSite(tmp_path, postgresql_url, redis_url)
    yield made
    made.close()


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"delaytasks_\w+", expression))


def expressions_of_dashboard() -> list[tuple[str, str]]:
    """Return the title and the expression of each query, with values for its variables."""
    document = json.loads(read_file("dashboard"))
    found = []
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "1m")
            found.append((panel["title"], text.replace("$shard", ".*").replace("$tag", ".*")))
    return found


def test_every_expression_of_dashboard_and_rules_has_a_result(site: ScrapedSite) -> None:
    site.start()
    d, prometheus = site.deployment, site.prometheus
    unserved = d.schedule("test.quiet", queue="nobody")
    tasks = [d.schedule("test.quiet") for _ in range(30)]
    d.wait_for(tasks)
    for _ in range(7):
        d.schedule("test.fail")
    failed = 'sum(delaytasks_runs_total{tag="test.fail",outcome="failed"})'
    wait_until(lambda: prometheus.value(failed) == 7, 60, d.logs, every_s=0.3)

    # The numbers of both workers are exact, with processes and with threads.
    done = 'sum(delaytasks_runs_total{tag="test.quiet",outcome="done"})'
    wait_until(lambda: prometheus.value(done) == 30, 30, d.logs, every_s=0.3)
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

    known = set(prometheus.get("label/__name__/values"))
    expressions = expressions_of_dashboard()
    assert len(expressions) > 25
    for title, text in expressions:
        assert names_in(text) <= known | ABSENT, title
        if not names_in(text) & ABSENT and " > 0" not in text:
            # A rate needs two scrapes.
            has_result = partial(prometheus.query, text)
            wait_until(has_result, 30, f"a result of {title}: {text}", every_s=0.3)
    check_rules(prometheus, known)
    d.delays.cancel(unserved.id)


def check_rules(prometheus: PrometheusServer, known: set[str]) -> None:
    """Check that Prometheus evaluates all rules, and which alerts are active."""

    def rules() -> list[dict[str, Any]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    wait_until(
        lambda: all(rule["health"] == "ok" for rule in rules()), 30, lambda: str(rules()), every_s=1
    )
    assert len(rules()) == read_file("rules").count("- alert:")
    for rule in rules():
        assert names_in(rule["query"]) <= known | ABSENT

    def active() -> set[str]:
        return {rule["name"] for rule in rules() if rule["state"] != "inactive"}

    wait_until(lambda: "DelayTasksQueueWithoutWorker" in active(), 30, lambda: str(rules()))
    assert active() <= {"DelayTasksQueueWithoutWorker", "DelayTasksFailing"}


def test_without_workers_the_alert_about_them_is_pending(site: ScrapedSite) -> None:
    d, prometheus = site.deployment, site.prometheus
    command = ["exporter", "--port", str(site.ports["exporter"])]
    d.python("exporter", "delaytasks", *command)
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
        worker = d.worker(DELAYTASKS_METRICS_FILE=str(tmp_path / "%n.prom"))
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
        first = d.worker(DELAYTASKS_METRICS_PORT=port)
        second = d.worker(DELAYTASKS_METRICS_PORT=port)
        wait_until(
            lambda: "metrics.not_served" in second.log(), 20, lambda: second.log(), every_s=0.1
        )
        assert "metrics.not_served" not in first.log()
        d.wait_for([d.schedule("test.quiet") for _ in range(5)])
    finally:
        d.close()
