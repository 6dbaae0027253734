"""A real Prometheus scrapes a real worker and an exporter, and evaluates the dashboard.

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

from delaytasks import Status
from tests.doc_pages import DASHBOARD, RULES
from tests.integration.conftest import Deploy
from tests.services import Server, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
JOBS = ("worker", "exporter", "producer")


class PrometheusServer(Server):
    """A private Prometheus, which scrapes what a test starts at `ports`, each second."""

    name = "Prometheus"

    def __init__(self, folder: Path) -> None:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("needs prometheus: it is not on the PATH")
        self.ports = {job: free_port() for job in JOBS}
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
def prometheus(tmp_path: Path) -> Iterator[PrometheusServer]:
    server = PrometheusServer(tmp_path)
    yield server
    server.stop()


def test_every_expression_of_the_dashboard_has_a_result(
    deploy: Deploy, prometheus: PrometheusServer, request: pytest.FixtureRequest
) -> None:
    # Expressions about the timer `redis` have results, too.
    d = deploy(timer="redis", horizon=900)
    for delay in (3600, 800):  # the first forecast has the peak
        d.schedule("test.quiet", delay)
    d.schedule("test.quiet", queue="nobody")
    command = ["serve", "--metrics", str(prometheus.ports["exporter"])]
    d.python("exporter", "delaytasks", *command).wait_for("metrics at", 30)
    d.beat()
    # This process serves the number of tasks that it schedules, as the documentation says.
    registry = CollectorRegistry()
    scheduled = Counter("delaytasks_scheduled_total", "as documented", ["tag"], registry=registry)
    d.delays.events.subscribe(
        lambda name, fields: name == "task.scheduled" and scheduled.labels(fields["tag"]).inc()
    )
    server, _ = start_http_server(prometheus.ports["producer"], "127.0.0.1", registry)
    request.addfinalizer(server.server_close)
    request.addfinalizer(server.shutdown)
    d.worker(DELAYTASKS_METRICS=str(prometheus.ports["worker"]))
    d.wait_for([d.schedule("test.fail") for _ in range(7)], Status.FAILED)
    # A process reports the rows that it settles last with its next chunk.
    d.wait_for([d.schedule("test.quiet", n / 20) for n in range(60)])
    for query, number in (
        ('delaytasks_tasks{status="FAILED"}', 7),
        ('delaytasks_overdue_tasks_by_tag{queue="nobody"}', 1),
        ("delaytasks_workers", 1),
        ("sum(delaytasks_pool_processes)", 2),
    ):
        wait_until(partial(prometheus.has, query, number), 60, query, every_s=0.3)

    panels = json.loads(DASHBOARD.read_text())["panels"]
    targets = [(panel["title"], it) for panel in panels for it in panel.get("targets", ())]
    assert len(targets) > 25
    for title, target in targets:
        text = target["expr"].replace("$__rate_interval", "1m").replace("$tag", ".*")
        # A rate needs two scrapes. A comparison has a result whatever it says: with `bool` it is 0
        # or 1.
        compared = re.sub(r"==|[<>]", r"\g<0> bool", text)
        wait_until(partial(prometheus.results, compared), 30, f"{title}: {compared}", 0.3)
        assert names_in(text) <= prometheus.names(), title
    assert names_in(re.sub("#.*", "", RULES.read_text())) <= prometheus.names()
