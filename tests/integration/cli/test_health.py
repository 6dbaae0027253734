"""`status --probe` tells healthy deployments and workers from others, also in outages."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks import StoreUnavailableError
from delaytasks.db import migrations
from delaytasks.db.sweep_queries import ServiceTimes
from delaytasks.db.types import db_now_plus
from delaytasks.operate import health
from delaytasks.operate.health import HealthChecks
from delaytasks.settings import Settings
from tests.integration.cli.project import Project
from tests.world.recording import set_columns

HOST = socket.gethostname()


def report(
    shop: Project, name: str = f"celery@{HOST}", pool: str = "prefork", **services: float
) -> None:
    times = ServiceTimes(**services)
    shop.store.workers.report(name, ["default"], pool, 2, 0, services=times)


def age(shop: Project, table: str, **columns: float) -> None:
    """Set the times of a table's rows to this many seconds ago."""
    values = {name: db_now_plus(-ago_s) for name, ago_s in columns.items()}
    set_columns(shop.store, table, **values)


def failed(shop: Project, *arguments: str) -> list[str]:
    """Return the names of the failed checks, with which the exit code agrees."""
    result = shop("status", "--probe", *arguments, "--json")
    found = shop.json("status", "--probe", *arguments, exit_code=result.exit_code)
    names = [check["name"] for check in found["checks"] if not check["is_ok"]]
    assert (found["is_healthy"], result.exit_code) == (not names, int(bool(names)))
    return names


def detail(shop: Project, check: str, *arguments: str) -> str:
    """Return what the check of this name says."""
    found = json.loads(shop("status", "--probe", *arguments, "--json").stdout)["checks"]
    text: str = next(each["detail"] for each in found if each["name"] == check)
    return text


@pytest.fixture
def healthy(shop: Project) -> Project:
    """Return a project with a worker on this host, whose tables were just swept."""
    report(shop)
    shop.store.sweeps.begin_sweep(0, 1, 1)
    return shop


def test_a_deployment_is_healthy_if_all_of_its_parts_are(healthy: Project) -> None:
    found = healthy.json("status", "--probe", "--max-overdue", "0")
    assert (found["component"], found["probe"]) == ("deployment", "ready")
    names = [check["name"] for check in found["checks"]]
    assert names == ["database", "tables", "worker", "queues", "sweep", "overdue", "broker"]
    assert failed(healthy, "worker") == []
    assert re.search(r"^database +ok +answers$", healthy("status", "--probe").stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("check", "damage"),
    [
        ("worker", lambda shop: age(shop, "workers", seen_at=60)),
        ("sweep", lambda shop: age(shop, "sweeps", swept_at=16)),
        ("overdue", lambda shop: [shop.overdue() for _ in range(3)]),
    ],
)
def test_each_fault_fails_its_own_check(
    healthy: Project, check: str, damage: Callable[[Project], None]
) -> None:
    damage(healthy)
    assert failed(healthy, "--max-overdue", "0") == [check]
    assert failed(healthy, "--max-overdue", "3") == [check] * (check != "overdue")
    if check == "overdue":  # others are not counted
        found = detail(healthy, "overdue", "--max-overdue", "1")
        assert found == "more than 1 overdue, at most 1"


@pytest.mark.parametrize(("head", "expected"), [("9999", ["tables"]), ("0001", [])])
def test_tables_are_of_this_version_or_newer(bare: Project, head: str, expected: list[str]) -> None:
    bare("db", "upgrade")
    report(bare)
    bare.store.sweeps.begin_sweep(0, 1, 1)
    bare.patch.setattr(migrations, "head", lambda: head)
    assert failed(bare) == expected
    remedy = f"this version has {head}; run: delaytasks -A {bare.name} db upgrade\n"
    assert (remedy in bare("status", "--probe").stdout) == bool(expected)


def test_a_broker_that_does_not_answer_stops_no_run(healthy: Project) -> None:
    report(healthy, f"run7-ab@{HOST}", "direct/prefork")
    healthy.patch.setattr(health, "ask_broker", lambda _: "refused")
    assert failed(healthy, "worker") == ["broker"]
    assert failed(healthy, "worker", "--live") == failed(healthy, "run") == []


def test_only_the_workers_of_this_host_or_of_the_name_count(healthy: Project) -> None:
    report(healthy, "w1@elsewhere")
    report(healthy, f"run7-ab@{HOST}", "direct/prefork")
    age(healthy, "workers", seen_at=60)
    report(healthy)
    assert failed(healthy, "worker", "--live") == []
    assert failed(healthy, "worker", "--live", "--name", "w1@elsewhere") == ["worker"]
    assert failed(healthy, "worker", "--live", "--name", "w2@elsewhere") == ["worker"]
    assert failed(healthy, "run", "--live") == ["worker"]


def test_a_lost_worker_counts_as_little_as_a_missing_one(healthy: Project) -> None:
    age(healthy, "workers", seen_at=60)
    assert healthy.store.workers.expire(15) == [f"celery@{HOST}"]
    assert failed(healthy) == failed(healthy, "worker", "--live") == ["worker"]
    assert detail(healthy, "worker") == "none is registered"
    report(healthy, f"w2@{HOST}")
    assert failed(healthy) == failed(healthy, "worker") == []


def test_beat_is_healthy_as_long_as_its_messages_reach_a_worker(healthy: Project) -> None:
    assert failed(healthy, "beat") == failed(healthy, "beat", "--live") == []
    report(healthy, beat_s=1.0)
    found = healthy.json("status", "--probe", "beat")["checks"]
    assert [check["name"] for check in found] == ["database", "tables", "beat", "broker"]
    age(healthy, "workers", beat_at=300)
    assert failed(healthy, "beat") == failed(healthy, "beat", "--live") == ["beat"]
    report(healthy, broker_down_s=9, beat_s=300)
    assert failed(healthy, "beat", "--live") == [], "without the broker it is unknown"


def test_a_queue_with_late_tasks_and_no_worker_fails_only_the_deployment(healthy: Project) -> None:
    healthy.schedule("mail")  # its queue is letters
    healthy.schedule("ok")
    assert failed(healthy) == []
    age(healthy, "tasks", expected_time=10)
    assert failed(healthy) == [], "a worker may be restarting"
    age(healthy, "tasks", expected_time=20)
    assert failed(healthy) == ["queues"]
    assert detail(healthy, "queues") == "no live worker serves letters, where tasks are late"
    healthy.delays.policies.pause(queue="letters")
    assert failed(healthy) == []
    healthy.delays.policies.resume(queue="letters")
    assert failed(healthy, "worker") == failed(healthy, "worker", "--live") == []
    healthy.store.workers.report("w", ["*"], "prefork", 2, 0)
    assert failed(healthy) == []


def test_no_restart_is_needed_while_no_database_answers(healthy: Project, tmp_path: Path) -> None:
    healthy.delays.close()
    (tmp_path / "shop.sqlite3").write_text("no database any more")
    assert failed(healthy, "worker", "--live") == []
    assert failed(healthy, "worker") == ["database"]


def test_a_database_that_hangs_is_given_up_in_time() -> None:
    may_end = threading.Event()

    class Hanging:
        @property
        def tasks(self) -> Any:
            may_end.wait()
            raise StoreUnavailableError("too late")

    hanging: Any = SimpleNamespace(store=Hanging(), settings=Settings(), direct_timer=True)
    [live] = HealthChecks(hanging, "worker", HOST, timeout_s=0.05).live()
    assert live.is_ok
    database, broker = HealthChecks(hanging, timeout_s=0.05).ready()
    assert not database.is_ok
    assert database.detail == "no answer within 50ms"
    assert broker.is_ok
    may_end.set()
