"""Run the example shops as users start them.

The web server and the worker are separate processes, and the tests send HTTP requests to them.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import redis
import requests
from celery import Celery
from sqlalchemy import create_engine, make_url

from delaytasks import DelayedTask, DelayTasks, Status
from tests.running import ROOT, Process
from tests.services import free_port
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
        self.environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith("DELAYTASKS_")
            },
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
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *arguments],
            cwd=self.project, env=self.environment, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def serve(self, *command: str) -> None:
        """Start the web server.

        The command contains its port as `{port}` and its folder as `{project}`.
        """
        port = free_port()
        server = self._start(
            "web", [part.format(port=port, project=self.project) for part in command]
        )
        self.url = f"http://127.0.0.1:{port}"
        wait_until(
            lambda: self._answers() or server.ended(), 30, f"the shop\n{server.log()}", every_s=0.05
        )
        assert not server.ended(), server.log()

    def work(self, *options: str) -> Process:
        command = [
            "-m",
            "celery",
            "-A",
            "shop",
            "worker",
            "-c",
            "1",
            "-n",
            f"{secrets.token_hex(3)}@shop",
            "-l",
            "INFO",
        ]
        worker = self._start("worker", [*command, "--without-gossip", "--without-mingle", *options])
        wait_until(
            lambda: " ready." in worker.log() or worker.ended(), 30, "the worker", every_s=0.05
        )
        assert not worker.ended(), worker.log()
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
        assert answer.status_code == status, (
            f"{answer.status_code} {answer.text[:2000]}\n{self.logs()}"
        )
        body: dict[str, Any] = (
            answer.json() if answer.headers["content-type"] == "application/json" else {}
        )
        return body

    def status(self, number: int) -> str:
        answer = requests.get(f"{self.url}/orders/{number}", timeout=20)
        return str(answer.json()["status"])

    def wait_for(self, number: int, status: str, deadline_s: float = 20) -> None:
        wait_until(
            lambda: self.status(number) == status,
            deadline_s,
            f"order {number} to be {status}: {self.tasks()}\n{self.logs()}",
            every_s=0.05,
        )

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
        wait_until(
            lambda: self.delays.get(tasks[unpaid]).status is Status.DONE,
            10,
            "the task to be settled",
        )
        done = self.delays.get(tasks[unpaid])
        assert tasks[paid].status is Status.CANCELLED
        assert done.execution_time is not None
        assert done.create_time is not None
        assert timedelta(0) <= done.execution_time - done.expected_time < timedelta(seconds=1.5), (
            self.logs()
        )
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


def new_database(url: str) -> tuple[str, Callable[[], None]]:
    """Create an empty database on the server of `url`.

    Return its URL and a function that drops it.
    """
    place, name = make_url(url), f"dt_shop_{secrets.token_hex(4)}"
    is_postgresql = place.get_backend_name() == "postgresql"

    def run(statement: str) -> None:
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(statement)
        engine.dispose()

    run(f"CREATE DATABASE {name}" + ("" if is_postgresql else " CHARACTER SET utf8mb4"))
    drop = f"DROP DATABASE IF EXISTS {name}" + (" WITH (FORCE)" if is_postgresql else "")
    return place.set(database=name).render_as_string(hide_password=False), lambda: run(drop)
