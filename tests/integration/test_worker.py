"""Test one worker on each broker, pool and database.

Scheduled tasks run once and on time, and their rows record it.
"""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta

import pytest
from sqlalchemy import text

from chaos.pids import children_of, is_alive
from delaytasks import Status
from tests.integration.conftest import Deploy
from tests.running import Deployment, combinations
from tests.waiting import IS_LONG, SLACK_S, wait_until

pytestmark = pytest.mark.slow

QUICK_ONES = "postgresql-redis-prefork postgresql-rabbitmq-threads sqlite-filesystem-solo"
SLOW_ONES = """psycopg-redis-prefork psycopg-rabbitmq-threads psycopg-redis-gevent
    mysql-redis-prefork mysql-rabbitmq-solo sqlite-redis-prefork sqlite-filesystem-gevent"""
COMBINATIONS = [*combinations(QUICK_ONES, is_quick=True), *combinations(SLOW_ONES)]
#: A row that blocks its chunk runs for this many seconds.
SLOW_S = 600 if IS_LONG else 6


@pytest.mark.parametrize(("database", "broker", "pool"), COMBINATIONS)
def test_tasks_run_on_time_and_their_rows_record_this(site: Deployment, pool: str) -> None:
    d = site
    worker = d.worker(pool=pool)
    near = [d.schedule(delay=1 + n / 50) for n in range(50)]
    near.append(d.delays.reschedule(d.schedule(delay=3600), 1))
    mail, cancelled = d.schedule("test.mail", 0.5), d.schedule(delay=2)
    assert d.delays.cancel(cancelled)
    failing = d.schedule("test.fail", 0, body={"text": "no way"})
    heap, request = d.schedule("test.heap"), d.schedule("test.request")
    d.insert()
    d.wait_for([*near, mail, heap, request])
    d.wait_for([failing], Status.FAILED)
    wait_until(lambda: d.counted()[Status.DONE] == 55, 15, "the plain row to run", 0.05)

    [[_, frozen]] = [run for run in d.runs() if run[0] == str(heap.id)]
    assert int(frozen) > 10_000, "the garbage collector ignores what the worker has loaded"
    assert ["test.request", str(request.id), "0", "default"] in d.runs()
    noted = [run[0] for run in d.runs() if len(run) == 3 and run[1] != "mail"]
    assert len(noted) == len(set(noted)) == 52
    assert d.early() == []
    assert d.status(cancelled) is Status.CANCELLED
    done = d.delays.get(near[0])
    assert (done.runs, done.error, done.lease_until) == (1, None, None)
    # Its queue has no other row. On a busy machine, a row behind others may be given back.
    assert (d.delays.get(mail).version == 2) is (d.store.database.backend != "postgresql")
    assert (done.worker or "").startswith(d.node(0) + "/")
    socket.inet_aton(done.ip_address or "")
    error = d.delays.get(failing).error or ""
    assert error.startswith("Traceback (most recent call last):\n"), error
    assert 'in fail\n    raise ValueError(body.get("text", "as asked"))' in error
    assert "delaytasks/run/" not in error, "the traceback begins with the processor"

    held = [d.schedule(delay=5) for _ in range(3)]
    worker.terminate()
    assert {d.status(task) for task in held} == {Status.NOT_COMPLETE}


def test_rows_behind_a_slow_one_are_given_back_and_run_elsewhere(deploy: Deploy) -> None:
    d = deploy(sweep=30, _self_sweep_s=60, _grace_s=20, horizon=60)
    due = d.now() + timedelta(seconds=4)
    body = {"file": str(d.file), "seconds": SLOW_S}
    slow = d.delays.schedule_delay("test.sleep", body, at=due, priority=9)
    others = [d.delays.schedule_delay("test.note", {"file": str(d.file)}, at=due) for _ in range(9)]
    d.worker(concurrency=2)
    d.wait_for(others, deadline_s=8)
    assert d.status(slow) is Status.RUNNING
    assert max(d.lateness_s()) < 2, "the time budget, and a moment"
    d.wait_for([slow], deadline_s=SLOW_S + 20)
    assert len(d.runs("began")) == len(d.runs("ended")) == 1, "its lease was renewed"


def test_a_processor_that_holds_the_gil_for_four_leases_runs_once(deploy: Deploy) -> None:
    d = deploy(lease=3)
    d.worker()
    task = d.schedule("test.hold_gil", 0, body={"seconds": 12})
    d.wait_for([task])
    assert [run[1] for run in d.runs()] == ["began", "ended"]
    assert d.delays.get(task).lapses == 0


@pytest.mark.parametrize("is_drain", [False, True])
def test_a_task_that_kills_its_process_fails_and_others_run(deploy: Deploy, is_drain: bool) -> None:
    d = deploy(broker="direct" if is_drain else "redis", max_lost_leases=3, lease=5)
    due = d.now() + timedelta(seconds=4)
    body = {"file": str(d.file)}
    poison = d.delays.schedule_delay("test.abort", body, at=due)
    neighbours = [d.delays.schedule_delay("test.note", body, at=due) for _ in range(20)]
    (d.drainer if is_drain else d.worker)()
    d.wait_for([poison], Status.FAILED, deadline_s=60)
    d.wait_for(neighbours)
    assert d.delays.get(poison).lapses == len(d.runs("aborts")) == 3
    assert "3 times in a row" in (d.delays.get(poison).error or "")
    assert max(d.delays.get(n).runs for n in neighbours) <= 2, "neighbours run once more at most"


def test_the_task_of_a_dead_process_runs_again_immediately(deploy: Deploy) -> None:
    d = deploy(sweep=30, _self_sweep_s=30, horizon=60, lease=60)
    d.worker()
    task = d.schedule("test.sleep", body={"seconds": 5})
    mail = d.schedule("test.sleep", queue="mail", priority=7, body={"seconds": 5})
    wait_until(lambda: len(d.runs()) == 2, 10, "both to begin")
    for run in d.runs():
        os.kill(int(run[2]), signal.SIGKILL)
    wait_until(lambda: len(d.runs()) == 4, 5, "both to begin again, long before the next sweep")
    assert {d.delays.get(t).lapses for t in (task, mail)} == {1}
    d.wait_for([task, mail])


def test_processes_of_a_killed_main_process_end_their_rows_and_exit(deploy: Deploy) -> None:
    d = deploy("postgresql", lease=60)
    worker, task = d.worker(), d.schedule("test.sleep", body={"seconds": 3})
    wait_until(lambda: len(d.runs()) == 1, 10, "one of the two processes to begin")
    children = children_of(worker.pid)
    assert len(children) >= 2
    os.kill(worker.pid, signal.SIGKILL)  # not its group
    d.wait_for([task], deadline_s=8)
    wait_until(lambda: not any(map(is_alive, children)), 5, "the processes to exit")
    assert d.delays.get(task).runs == 1


def test_a_process_of_a_killed_main_process_ends_although_its_rows_run(deploy: Deploy) -> None:
    d = deploy("postgresql", lease=60)
    worker, task = d.worker(), d.schedule("test.wait", body={"seconds": 40})
    wait_until(lambda: len(d.runs()) == 1, 10, "the task to begin")
    children = children_of(worker.pid)
    d.wait_for([d.schedule("test.note") for _ in range(4)])  # the chunk of the task has ended
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, children)), 7.5 + SLACK_S, "the processes to exit")
    assert d.delays.get(task).status is Status.RUNNING


@pytest.mark.parametrize("database", ["postgresql", "mysql", "sqlite"])
def test_a_committed_effect_happens_once_despite_kills(deploy: Deploy, database: str) -> None:
    d = deploy(database)
    table = d.settings["table_prefix"] + "credits"
    with d.store.database.begin() as connection:
        connection.execute(text(f"CREATE TABLE {table} (task bigint)"))
    d.worker()
    places = ["before", "after the effect", "after complete", "after the commit", None]
    bodies = [{"table": table, "dies": place} for place in places * 3]
    tasks = [d.schedule("test.credit", 0.2, body=body) for body in bodies]
    d.wait_for(tasks, deadline_s=60)
    with d.store.database.begin() as connection:
        effects = connection.execute(text(f"SELECT task FROM {table}")).scalars().all()
        connection.execute(text(f"DROP TABLE {table}"))
    assert sorted(effects) == sorted(task.id for task in tasks)
    died = [task for task, body in zip(tasks, bodies, strict=True) if body["dies"] in places[:3]]
    assert all(d.delays.get(task).runs > 1 for task in died)


def test_a_partition_that_beat_omits_is_swept_by_a_worker_that_is_busy(deploy: Deploy) -> None:
    # The short horizon keeps the rows out of the first sweep.
    d = deploy(sweep="1s 2", horizon=3)
    d.conf["beat_schedule"] = {"sweep": {"task": "delaytasks.sweep", "schedule": 0.5, "args": (0,)}}
    beat, worker = d.beat(), d.worker(concurrency=1)
    due = d.now() + timedelta(seconds=6)
    sleeper = d.schedule("test.sleep", 0, body={"seconds": 4})
    wait_until(d.runs, 10, "the sleeper to begin")
    # These ids belong to sweep partition 1.
    ids = [1_000_003 * n + 1 for n in range(1, 4)]
    for id in ids:
        d.insert(id=id, expected_time=due)
    worker.wait_for("sweep.self sweep_partition=1", 10)
    d.wait_for([sleeper])
    wait_until(lambda: all(d.delays.get(id).is_finished for id in ids), 15, "the rows to run", 0.05)
    assert max(d.lateness_s()) < d.settings["_grace_s"], "armed in time, not found overdue"
    assert "sweep.self sweep_partition=0" not in worker.log(), beat.log()


def test_beat_sweeps_on_quorum_queues(deploy: Deploy) -> None:
    d = deploy("postgresql", "rabbitmq-quorum", _self_sweep_s=60)
    beat = d.beat("DEBUG")
    beat.wait_for("Sending due task")  # it is the first to declare the queue
    worker = d.worker()
    d.insert(in_s=3)
    wait_until(lambda: d.counted()[Status.DONE] == 1, 15, "beat's sweep to find the row", 0.05)
    assert "PRECONDITION" not in beat.log() + worker.log()


def test_a_worker_that_quits_immediately_returns_its_entries_to_the_broker(deploy: Deploy) -> None:
    d = deploy(sweep=60, _self_sweep_s=120, horizon=120, _grace_s=30)
    first = d.worker(concurrency=1)
    d.schedule("test.sleep", 0, body={"seconds": 8})
    wait_until(d.runs, 10, "the sleeper to begin")
    held = [d.schedule(delay=4) for _ in range(10)]
    d.worker()
    first.signal(signal.SIGQUIT)
    d.wait_for(held, deadline_s=8)
    assert max(d.lateness_s()) < 2
