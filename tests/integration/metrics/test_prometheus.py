"""A real Prometheus scrapes real workers and an exporter, and evaluates the dashboard.

`tests/unit/test_alert_rules.py` has the rules.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client import CollectorRegistry, Counter, start_http_server

from delaytasks import DelayedTask, DelayTasks
from delaytasks.operate.monitoring import read_file
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.services import Server, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
JOBS = ("prefork", "threads", "exporter", "producer")


def count_scheduled(delays: DelayTasks, registry: CollectorRegistry) -> None:
    """Count what this process schedules, as the documentation of metrics says."""
    about = "Tasks that this process has scheduled."
    scheduled = Counter("delaytasks_scheduled_total", about, ["tag"], registry=registry)

    def count(name: str, fields: dict[str, Any]) -> None:
        if name == "task.scheduled":
            scheduled.labels(fields["tag"]).inc(fields.get("count", 1))

    delays.events.subscribe(count)


class ScrapedSite(Deployment):
    _stops: tuple[Callable[[], object], ...] = ()

    def scrape(self) -> None:
        """Start a Prometheus."""
        self.ports = {job: free_port() for job in JOBS}
        self.prometheus = PrometheusServer(self.folder, self.ports)
        self._stops = (self.prometheus.stop,)

    def start(self) -> None:
        registry = CollectorRegistry()
        count_scheduled(self.delays, registry)
        server, _ = start_http_server(self.ports["producer"], "127.0.0.1", registry)
        self._stops += (server.shutdown, server.server_close)
        self.beat()
        for pool in ("prefork", "threads"):
            self.worker(pool=pool, DELAYTASKS_METRICS=str(self.ports[pool]))

    def export(self) -> None:
        command = ["serve", "--metrics", str(self.ports["exporter"])]
        exporter = self.python("exporter", "delaytasks", *command)
        exporter.wait_for("metrics at", 30)

    def expect_result(self, expression: str, what: str) -> None:
        """Wait until an expression has a result. A rate needs two scrapes.

        A comparison has one whatever it says: with `bool` it is 0 or 1.
        """
        compared = re.sub(r"==|[<>]", r"\g<0> bool", expression)
        has_result = partial(self.prometheus.query, compared)
        wait_until(has_result, 30, f"a result of {what}: {compared}", every_s=0.3)
        assert names_in(expression) <= set(self.prometheus.get("label/__name__/values")), what

    def close(self) -> None:
        for stop in self._stops:
            stop()
        super().close()


def names_in(text: str) -> set[str]:
    return set(re.findall(r"delaytasks_\w+", text))


def expressions_of_dashboard() -> list[tuple[str, str]]:
    """Return the title and the expression of each query, with values for its variables."""
    document = json.loads(read_file("dashboard"))
    found = []
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "1m")
            found.append((panel["title"], text.replace("$tag", ".*")))
    return found


def test_every_expression_of_the_dashboard_has_a_result(deploy: Deploy) -> None:
    # Expressions about the timer `redis` have results, too.
    d = site = deploy(kind=ScrapedSite, timer="redis", horizon=900)
    site.scrape()
    prometheus = site.prometheus
    d.schedule("test.quiet", 3600)  # the first forecast has this peak
    near = d.schedule("test.quiet", 800)
    unserved = d.schedule("test.quiet", queue="nobody")

    site.export()
    site.start()
    followers: list[DelayedTask] = []

    def is_counted(query: str, number: int) -> bool:
        """A process reports the rows that it settles last with its next chunk: let each have one.

        Without the sleep, one process would run all that follows.
        """
        if prometheus.value(query) != number:
            followers.extend(d.schedule("test.sleep", body={"seconds": 0.3}) for _ in range(8))
        return prometheus.value(query) == number

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
    shown = 'delaytasks_tasks{status="FAILED"}'
    wait_until(lambda: prometheus.value(shown) == 7, 60, "an exporter's scrape")
    late = 'delaytasks_overdue_tasks_by_tag{queue="nobody"}'
    wait_until(lambda: prometheus.value(late) == 1, 60, "the late task", every_s=0.3)
    assert prometheus.value("delaytasks_workers") == 2
    assert prometheus.value("delaytasks_broker_up") == 1
    assert prometheus.value("sum(delaytasks_runs_on_time_total)") == 1
    scheduled = 'sum(delaytasks_scheduled_total{job="producer"})'
    wait_until(lambda: prometheus.value(scheduled) == 38 + len(followers), 30, scheduled, 0.3)
    assert 0 < (prometheus.value("delaytasks_forecast_peak_utilization") or 0) < 1

    expressions = expressions_of_dashboard()
    assert len(expressions) > 25
    for title, text in expressions:
        site.expect_result(text, title)
    rules = re.sub("#.*", "", read_file("rules"))
    assert names_in(rules) <= set(prometheus.get("label/__name__/values"))
    d.delays.cancel(unserved)
    d.delays.cancel(near)


def test_a_worker_writes_its_metrics_to_a_file(deploy: Deploy, tmp_path: Path) -> None:
    d = deploy()
    worker = d.worker(DELAYTASKS_METRICS=str(tmp_path / "%n.prom"))
    d.wait_for([d.schedule("test.quiet")])
    worker.terminate()
    [file] = tmp_path.glob("*.prom")
    assert 'delaytasks_runs_total{outcome="done",tag="test.quiet"} 1.0' in file.read_text()


# -- A private Prometheus, which scrapes what a test starts ---------------------------------------


class PrometheusServer(Server):
    """Scrapes `targets`, by the names of their jobs, each second."""

    name = "Prometheus"

    def __init__(self, folder: Path, targets: dict[str, int]) -> None:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("needs prometheus: it is not on the PATH")
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
                for name, port in targets.items()
            ],
        }
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(config))  # JSON is YAML, too
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api/v1"
        places = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        command = [program, *places, f"--web.listen-address=127.0.0.1:{port}"]
        super().__init__(command, folder / "prometheus.log")

    def _answers(self) -> bool:
        try:
            return requests.get(self.url.replace("/api/v1", "/-/ready"), timeout=5).ok
        except requests.ConnectionError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        answer = requests.get(f"{self.url}/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the values of an expression now, with their labels."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float | None:
        """Return the only value of an expression, or None without one."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None
