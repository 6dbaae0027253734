"""Run the example shops as users start them.

The web server and the worker are separate processes, and the tests send HTTP requests to them.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import requests
from celery import Celery

from delaytasks import DelayedTask, DelayTasks, Status
from tests.running import ROOT, Process, output_of
from tests.services import free_port, own_database
from tests.waiting import wait_until

PAY_WITHIN_S = 2.0


class ExampleShop:
    """Run an example under `examples/` with its own database and its own queues."""

    def __init__(self, example: str, folder: Path, database_url: str, broker_url: str) -> None:
        self.project = ROOT / "examples" / example
        self.folder = folder
        self.database_url = database_url
        self.broker_url = broker_url
        name = "shop" + secrets.token_hex(3)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("DELAYTASKS_")}
        self.environment = {
            **kept,
            "PYTHONPATH": f"{self.project}{os.pathsep}{ROOT}",
            "SHOP_DATABASE_URL": database_url,
            "SHOP_NAMESPACE": name,
            "SHOP_PAY_WITHIN_S": str(PAY_WITHIN_S),
            "CELERY_BROKER_URL": broker_url,
        }
        app = Celery("reader", set_as_current=False)
        app.conf.broker_url = broker_url
        #: Reads the same tables and queues from the test process.
        self.delays = DelayTasks(app, database_url, namespace=name)
        self._processes: list[Process] = []
        self.url = ""

    def command(self, *arguments: str) -> str:
        """Run a command of the project and return its output."""
        command = [sys.executable, "-W", "ignore", *arguments]
        return output_of(command, self.project, self.environment)

    def serve(self, *command: str) -> None:
        """Start the web server.

        The command contains its port as `{port}` and its folder as `{project}`.
        """
        port = free_port()
        parts = [part.format(port=port, project=self.project) for part in command]
        server = self._start("web", parts)
        self.url = f"http://127.0.0.1:{port}"
        wait_until(lambda: self._answers() or server.ended(), 30, server.log, every_s=0.05)
        assert not server.ended(), server.log()

    def work(self, *options: str) -> Process:
        command = "-m celery -A shop worker -c 1 -l INFO --without-gossip --without-mingle -n"
        worker = self._start("worker", [*command.split(), f"{secrets.token_hex(3)}@shop", *options])
        worker.wait_for(" ready.", 30)
        return worker

    def _start(self, name: str, command: list[str]) -> Process:
        log = self.folder / f"{name}{len(self._processes)}.log"
        process = Process([sys.executable, "-W", "ignore", *command], self.environment, log)
        self._processes.append(process)
        return process

    def _answers(self) -> bool:
        try:
            return requests.get(f"{self.url}/orders/0", timeout=5).status_code == 404
        except requests.ConnectionError:
            return False

    # -- requests of a customer -------------------------------------------------------------------

    def post(self, path: str, status: int, **fields: str) -> dict[str, Any]:
        answer = requests.post(self.url + path, data=fields, timeout=20)
        assert answer.status_code == status, f"{answer.text[:2000]}\n{self.logs()}"
        is_json = answer.headers["content-type"] == "application/json"
        body: dict[str, Any] = answer.json() if is_json else {}
        return body

    def status(self, number: int) -> str:
        answer = requests.get(f"{self.url}/orders/{number}", timeout=20)
        return str(answer.json()["status"])

    def wait_for(self, number: int, status: str, deadline_s: float = 20) -> None:
        what = f"order {number} to be {status}: {self.tasks()}\n{self.logs()}"
        wait_until(lambda: self.status(number) == status, deadline_s, what, every_s=0.05)

    def check_orders(self) -> None:
        """Check that an unpaid order is closed on time, but neither a paid nor a failed one."""
        unpaid = self.post("/orders", 201, item="a book")["number"]
        paid = self.post("/orders", 201, item="a pen")["number"]
        self.post("/orders/fail", 500)
        assert self.post(f"/orders/{paid}/pay", 200) == {"number": paid, "status": "paid"}
        assert self.status(unpaid) == "placed"

        self.wait_for(unpaid, "closed")
        assert self.status(paid) == "paid"
        assert self.post(f"/orders/{unpaid}/pay", 409)["error"] == "too late to pay"

        tasks = {task.body["order"]: task for task in self.tasks()}
        # The request that failed has no task.
        assert set(tasks) == {unpaid, paid}
        wait_until(lambda: self.delays.get(tasks[unpaid]).is_finished, 10, "the task to be settled")
        done = self.delays.get(tasks[unpaid])
        assert (done.status, tasks[paid].status) == (Status.DONE, Status.CANCELLED)
        assert done.execution_time is not None
        assert done.create_time is not None
        late = done.execution_time - done.expected_time
        assert timedelta(0) <= late < timedelta(seconds=1.5), self.logs()
        assert done.expected_time - done.create_time == timedelta(seconds=PAY_WITHIN_S)

    # -- tasks in the database --------------------------------------------------------------------

    def tasks(self) -> list[DelayedTask]:
        return self.delays.find(tag="order.close").tasks

    def logs(self) -> str:
        return "\n".join(f"--- {p.log_file.name}\n{p.log()[-4000:]}" for p in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.end()
        with redis.Redis.from_url(self.broker_url) as client:
            for key in client.keys(f"*{self.environment['SHOP_NAMESPACE']}*"):
                client.delete(key)
        self.delays.close()


def fresh_database(kind: str, request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """Yield the URL of an empty database that only one test uses."""
    if kind == "sqlite":
        yield f"sqlite:///{folder / 'shop.sqlite3'}"
        return
    url, drop = own_database(request.getfixturevalue(f"{kind}_url"), f"_{secrets.token_hex(4)}")
    try:
        yield url
    finally:
        drop()
