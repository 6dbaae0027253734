"""`run` runs overdue tasks in this process."""

from __future__ import annotations

import re
import sys

import pytest
from sqlalchemy import text

from delaytasks import Status
from delaytasks.db.types import db_now_plus
from tests.integration.cli.project import Project
from tests.services import free_port
from tests.world.recording import set_columns


def test_run_recovers_and_runs_overdue_tasks_without_a_broker_and_no_others(shop: Project) -> None:
    shop.patch.setenv("CELERY_BROKER_URL", f"redis://127.0.0.1:{free_port()}/0")
    lost = shop.schedule()
    shop.store.claims("dead", None).claim_due("default", [0], 1)
    set_columns(shop.store, "tasks", lease_until=db_now_plus(-1))
    overdue = [lost] + [shop.schedule("ok", priority=number % 3) for number in range(30)]
    overdue.append(shop.schedule("mail"))
    failed, unknown = shop.schedule("bad"), shop.schedule("nobody's")
    later = shop.schedule(delay=60)
    answer = shop.json("run")
    assert answer.pop("seconds") >= 0
    ended = {"succeeded": 32, "failed": 1, "is_stopped": False}
    assert answer == {"claimed": 34, "failed_chunks": 0, **ended}
    assert {shop.status(task) for task in overdue} == {Status.DONE}
    assert shop.status(failed) is Status.FAILED
    assert shop.status(unknown) is shop.status(later) is Status.NOT_COMPLETE
    for tag in ("ok", "bad", "nobody's"):
        shop.schedule(tag)
    said = shop("run").stdout.splitlines()
    assert re.fullmatch(r"took 3 tasks in \S+: 1 DONE, 1 FAILED", said[0])


def test_run_runs_only_the_given_queues(shop: Project) -> None:
    for _ in range(3):
        shop.schedule("noisy")  # what it prints is not in the document
        shop.schedule("mail")
    assert shop.json("run", "--queue", "letters")["succeeded"] == 3
    assert {task.tag for task in shop.delays.find(status="DONE")} == {"mail"}
    assert shop.json("run")["succeeded"] == 3


@pytest.mark.slow
def test_run_gives_up_a_database_that_refuses_claims(shop: Project) -> None:
    task = shop.schedule()
    refuse = f"""CREATE TRIGGER refuse BEFORE UPDATE ON {shop.store.schema.tasks.name}
        WHEN NEW.status = {Status.RUNNING:d} BEGIN SELECT RAISE(ABORT, 'not today'); END"""
    with shop.store.database.begin() as connection:
        connection.execute(text(refuse))
    assert shop.json("run", exit_code=1)["failed_chunks"] > 0
    with shop.store.database.begin() as connection:
        connection.execute(text("DROP TRIGGER refuse"))
    sys.modules.pop(shop.name).delays.close()
    assert shop.json("run")["succeeded"] == 1
    assert shop.status(task) is Status.DONE


def test_run_renews_the_lease_of_a_long_task(shop: Project) -> None:
    shop.patch.setenv("DELAYTASKS_LEASE", "0.9")
    sys.modules.pop(shop.name).delays.close()
    shop.schedule("long")
    assert shop.json("run")["succeeded"] == 1


def test_ctrl_c_stops_it_after_the_current_chunk(shop: Project) -> None:
    shop.patch.setenv("DELAYTASKS__CHUNK_MAX", "10")
    for _ in range(31):
        shop.schedule("stop")
    answer = shop.json("run", exit_code=1)
    assert answer["is_stopped"]
    assert 1 <= answer["succeeded"] <= 10
    assert len(shop.delays.find(status="NOT_COMPLETE")) == 31 - answer["succeeded"]
    assert shop.json("run")["succeeded"] == 31 - answer["succeeded"]
