"""A real Prometheus scrapes real workers and an exporter, and evaluates the dashboard.

`tests/unit/test_alert_rules.py` has the rules.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client import CollectorRegistry, Counter, start_http_server

from delaytasks import DelayedTask
from delaytasks.operate.monitoring import read_file
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.services import Server, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
POOLS = ("prefork", "threads")


class PrometheusServer(Server):
    """A private Prometheus, which scrapes each second what a test starts, at `ports`."""

    name = "Prometheus"

    def __init__(self, folder: Path) -> None:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("needs prometheus: it is not on the PATH")
        self.ports = {job: free_port() for job in (*POOLS, "exporter", "producer")}
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
                for name, port in self.ports.items()
            ],
        }
        file, port = folder / "prometheus.yml", free_port()
        file.write_text(json.dumps(config))  # JSON is YAML, too
        self.url = f"http://127.0.0.1:{port}"
        places = [f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}"]
        command = [program, *places, f"--web.listen-address=127.0.0.1:{port}"]
        super().__init__(command, folder / "prometheus.log")

    def _answers(self) -> bool:
        try:
            return requests.get(f"{self.url}/-/ready", timeout=5).ok
        except requests.ConnectionError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        answer = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def names(self) -> set[str]:
        return set(self.get("label/__name__/values"))

    def results(self, expression: str) -> list[float]:
        """Return the values of an expression now, without their labels."""
        found = self.get("query", query=expression)["result"]
        return [float(each["value"][1]) for each in found]

    def has(self, expression: str, value: float) -> bool:
        return self.results(expression) == [value]


def names_in(text: str) -> set[str]:
    return set(re.findall(r"delaytasks_\w+", text))


@pytest.fixture
def scraped(deploy: Deploy) -> Iterator[tuple[Deployment, PrometheusServer]]:
    """Start all processes of a deployment, and a Prometheus that scrapes them."""
    # Expressions about the timer `redis` have results, too.
    d = deploy(timer="redis", horizon=900)
    d.schedule("test.quiet", 3600)  # the first forecast has this peak
    d.schedule("test.quiet", 800)
    d.schedule("test.quiet", queue="nobody")
    prometheus = PrometheusServer(d.folder)
    command = ["serve", "--metrics", str(prometheus.ports["exporter"])]
    d.python("exporter", "delaytasks", *command).wait_for("metrics at", 30)
    d.beat()
    for pool in POOLS:
        d.worker(pool=pool, DELAYTASKS_METRICS=str(prometheus.ports[pool]))

    # This process serves the number of tasks that it schedules, as the documentation says.
    registry = CollectorRegistry()
    about = "Tasks that this process has scheduled."
    scheduled = Counter("delaytasks_scheduled_total", about, ["tag"], registry=registry)

    def count(name: str, fields: dict[str, Any]) -> None:
        if name == "task.scheduled":
            scheduled.labels(fields["tag"]).inc(fields.get("count", 1))

    d.delays.events.subscribe(count)
    server, _ = start_http_server(prometheus.ports["producer"], "127.0.0.1", registry)
    yield d, prometheus
    server.shutdown()
    server.server_close()
    prometheus.stop()


def test_every_expression_of_the_dashboard_has_a_result(
    scraped: tuple[Deployment, PrometheusServer],
) -> None:
    d, prometheus = scraped
    followers: list[DelayedTask] = []

    def is_counted(query: str, number: int) -> bool:
        """A process reports the rows that it settles last with its next chunk: let each have one.

        Without the sleep, one process would run all that follows.
        """
        if not prometheus.has(query, number):
            followers.extend(d.schedule("test.sleep", body={"seconds": 0.3}) for _ in range(8))
        return prometheus.has(query, number)

    def wait_for(expression: str, value: float) -> None:
        wait_until(lambda: prometheus.has(expression, value), 60, expression, 0.3)

    tasks = [d.schedule("test.quiet") for _ in range(30)]
    d.wait_for(tasks)
    for _ in range(7):
        d.schedule("test.fail")
    # The numbers of both workers are exact, with processes and with threads.
    for tag, outcome, number in (("fail", "failed", 7), ("quiet", "done", 30)):
        runs = f'sum(delaytasks_runs_total{{tag="test.{tag}",outcome="{outcome}"}})'
        wait_until(partial(is_counted, runs, number), 60, d.logs, every_s=1)
    for kind in ("lateness", "duration"):
        name = f"delaytasks_run_{kind}_seconds"
        assert prometheus.has(f'sum({name}_count{{tag="test.quiet"}})', 30)
        assert prometheus.has(f'sum({name}_bucket{{tag="test.quiet",le="+Inf"}})', 30)
    wait_for('delaytasks_tasks{status="FAILED"}', 7)
    wait_for('delaytasks_overdue_tasks_by_tag{queue="nobody"}', 1)
    for name, value in (("workers", 2), ("broker_up", 1)):
        assert prometheus.has(f"delaytasks_{name}", value)
    assert prometheus.has("sum(delaytasks_pool_processes)", 4)
    wait_for('sum(delaytasks_scheduled_total{job="producer"})', 37 + len(followers))

    panels = json.loads(read_file("dashboard"))["panels"]
    targets = [(panel["title"], it) for panel in panels for it in panel.get("targets", ())]
    assert len(targets) > 25
    for title, target in targets:
        text = target["expr"].replace("$__rate_interval", "1m").replace("$tag", ".*")
        # A rate needs two scrapes. A comparison has a result whatever it says: with `bool` it is 0
        # or 1.
        compared = re.sub(r"==|[<>]", r"\g<0> bool", text)
        wait_until(partial(prometheus.results, compared), 30, f"{title}: {compared}", 0.3)
        assert names_in(text) <= prometheus.names(), title
    assert names_in(re.sub("#.*", "", read_file("rules"))) <= prometheus.names()
