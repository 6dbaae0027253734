"""Workers in processes of their own, on each database, broker and pool."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from delaytasks import DelayedTask, NewTask, Status
from delaytasks.runtime import runtime_of
from tests.conformance.test_timers import FAULT_SLACK_S, R1_S, ran_once
from tests.integration.conftest import Deploy
from tests.running import combinations
from tests.services import RedisServer, free_port
from tests.waiting import IS_LONG, SLACK_S, wait_until

pytestmark = pytest.mark.slow

QUICK_ONES = "postgresql-redis-prefork postgresql-rabbitmq-threads sqlite-filesystem-solo"
SLOW_ONES = "psycopg-rabbitmq-prefork psycopg-redis-gevent mysql-redis-prefork sqlite-redis-threads"
COMBINATIONS = [*combinations(QUICK_ONES, is_quick=True), *combinations(SLOW_ONES)]
WAITS = ["test.wait", "test.async"]
#: A row that blocks its chunk runs for this many seconds.
SLOW_S = 600 if IS_LONG else 6
#: No sweep runs during a test.
UNSWEPT: dict[str, Any] = {"sweep": 60, "_self_sweep_s": 120, "horizon": 120, "_grace_s": 30}


@pytest.mark.parametrize(("database", "broker", "pool"), COMBINATIONS)
def test_tasks_of_each_kind_run_once_and_none_early_and_are_counted(
    deploy: Deploy, database: str, broker: str, pool: str
) -> None:
    d = deploy(database, broker, timer="redis" if broker == "redis" else "eta")
    port = free_port()
    worker = d.worker(pool=pool, DELAYTASKS_METRICS=str(port))
    near = [d.schedule(delay=1 + n / 50) for n in range(50)]
    near.append(d.delays.reschedule(d.schedule(delay=3600), 1))
    mail, cancelled = d.schedule("test.mail", 0.5), d.schedule(delay=2)
    assert d.delays.cancel(cancelled)
    failing = d.schedule("test.fail", body={"text": "no way"})
    heap, request = d.schedule("test.heap"), d.schedule("test.request")
    d.insert()
    waiting = [d.schedule(WAITS[n % 2], 2, body={"seconds": 1}) for n in range(40)]
    batch = [d.schedule("test.batch", 2, body={"number": n}) for n in range(60)]
    long = [d.schedule(tag, body={"seconds": 1.5 * d.settings["lease"]}) for tag in WAITS]
    done = [*near, mail, heap, request, *waiting, *batch[::2], *long]
    d.wait_for(done)
    d.wait_for([failing, *batch[1::2]], Status.FAILED)
    wait_until(lambda: d.counted()[Status.DONE] == len(done) + 1, 15, "the plain row", 0.05)

    runs, found = d.runs(), [d.delays.get(task) for task in done]
    assert d.early() == []
    assert {(row.runs, row.error, row.lease_until) for row in found} == {(1, None, None)}
    assert (found[0].worker or "").startswith(d.node(0) + "/")
    noted = [run[0] for run in runs if len(run) == 3 and run[1].isdigit()]
    assert len(noted) == len(set(noted)) == len(near) + 1
    assert d.status(cancelled) is Status.CANCELLED
    [[_, frozen]] = [run for run in runs if run[0] == str(heap.id)]
    assert int(frozen) > 10_000, "the garbage collector ignores what the worker has loaded"
    assert ["test.request", str(request.id), "0", "default"] in runs
    error = d.delays.get(failing).error or ""
    assert error.startswith("Traceback (most recent call last):\n"), error
    assert "delaytasks/run/" not in error, "the traceback begins with the processor"
    ends = [d.delays.get(task).update_time for task in waiting]
    took = max(filter(None, ends)) - waiting[-1].expected_time
    assert took < timedelta(seconds=10), "one after another they would take 40 s, or 20 s by two"
    in_threads = {str(task.id) for task in [*waiting, *long][::2]}
    began = d.runs("began")
    assert all(run[0] == run[3] for run in began if run[0] in in_threads), "its own request"
    loops = {(run[2], run[3]) for run in began if run[0] not in in_threads}
    assert len(loops) == len({process for process, _ in loops}), "one loop in a process"
    sizes = [int(run[0]) for run in d.runs("together")]
    assert (sum(sizes), max(sizes) <= 40) == (60, True)

    failures, url = 'runs_total{outcome="failed",tag="test.fail"} 1.0', f"http://127.0.0.1:{port}"
    wait_until(lambda: failures in httpx.get(url, timeout=10).text, 15, "the metrics", 0.05)

    held = [d.schedule(delay=9) for _ in range(3)]
    last = [d.schedule(tag, body={"seconds": 1.5}) for tag in WAITS for _ in range(3)]
    wait_until(lambda: len(d.runs("began")) == len(began) + 6, 10, "the last ones to begin")
    worker.terminate()
    assert {d.status(task) for task in held} == {Status.NOT_COMPLETE}
    assert {d.status(task) for task in last} == {Status.DONE}, "it waits for what runs"
    totals = d.delays.statistics.totals(since="2h")
    counts = {tag: (one.started, one.done, one.failed) for tag, one in totals.items()}
    wanted = {"test.note": (52, 52, 0), "test.fail": (1, 0, 1), "test.batch": (60, 30, 30)}
    wanted |= dict.fromkeys(WAITS, (24, 24, 0))
    assert {tag: counts[tag] for tag in wanted} == wanted
    assert totals["test.wait"].duration_s > 20


def test_rows_behind_a_slow_one_are_given_back_and_run_elsewhere(deploy: Deploy) -> None:
    d = deploy(sweep=30, _self_sweep_s=60, _grace_s=20, horizon=60)
    d.worker(concurrency=2)
    due = d.now() + timedelta(seconds=1)
    body = {"file": str(d.file), "seconds": SLOW_S}
    slow = d.delays.schedule_delay("test.sleep", body, at=due, priority=9)
    others = [d.delays.schedule_delay("test.note", {"file": str(d.file)}, at=due) for _ in range(9)]
    d.wait_for(others, deadline_s=8)
    assert d.status(slow) is Status.RUNNING
    assert max(d.lateness_s()) < 2, "the time budget, and a moment"
    d.wait_for([slow], deadline_s=SLOW_S + 20)
    assert len(d.runs("began")) == len(d.runs("ended")) == 1, "its lease was renewed"


def test_a_processor_that_holds_the_gil_for_four_leases_runs_once(deploy: Deploy) -> None:
    d = deploy(lease=3)
    worker, task = d.worker(), d.schedule("test.sleep", body={"seconds": 12, "holds_gil": True})
    wait_until(d.runs, 10, "it to begin")
    said = d.command("inspect", "stats", "-d", d.node(0), "-t", "10")
    assert said.status == 0, f"{said.log()}\n{worker.log()}"
    assert re.search(r'"oldest_chunk": "\d{4}-\d\d-\d\dT', said.log()), "in Celery's own JSON"
    assert re.search(r'"chunks": 1\b', said.log())
    wait_until(lambda: [one["busy"] for one in d.store.workers.all()] == [1], 5, "its report")
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


def test_a_chunk_of_a_process_that_died_before_the_broker_blocks_none(deploy: Deploy) -> None:
    """The new process inherits the pipe of the dead one.

    Celery therefore reports that the new process has the chunk.
    """
    d = deploy(conf={"imports": ["tests.project", "tests.saboteur"]})
    d.worker(concurrency=1)
    how = {"destination": [d.node(0)], "reply": True, "timeout": 10, "limit": 1}
    [answer] = runtime_of(d.delays).celery.control.broadcast("lose_broker", {}, **how)
    assert answer[d.node(0)]["forgotten"] == 1
    d.wait_for([d.schedule()], deadline_s=SLACK_S)


def test_a_process_at_its_max_tasks_waits_for_its_concurrent_tasks(deploy: Deploy) -> None:
    d = deploy()
    d.worker("--max-tasks-per-child", "1", concurrency=1)
    tasks: list[DelayedTask] = []
    for _ in range(3):
        tasks.append(d.schedule("test.wait", 0, body={"seconds": 1}))
        wait_until(lambda: len(d.runs("began")) == len(tasks), 15, "it to begin")
    d.wait_for(tasks)
    assert {d.delays.get(task).runs for task in tasks} == {1}
    assert len({run[2] for run in d.runs("began")}) == 3


@pytest.mark.quick
def test_the_next_task_of_a_limit_starts_immediately_and_not_at_a_sweep(deploy: Deploy) -> None:
    d = deploy(**UNSWEPT)
    d.delays.policies.set(tag="test.sleep", concurrency=1)
    d.worker(pool="threads", concurrency=4)
    tasks = [d.schedule("test.sleep", 1, body={"seconds": 0.01}) for _ in range(60)]
    d.wait_for(tasks, deadline_s=40)
    assert [run[1] for run in d.runs()] == ["began", "ended"] * 60


def test_without_remote_control_tasks_run_and_no_message_shuts_a_worker_down(
    deploy: Deploy, start_redis: Callable[[], RedisServer]
) -> None:
    d = deploy("postgresql", start_redis().url, {"worker_enable_remote_control": False})
    worker = d.worker(ready_s=90)
    # The test acts as an attacker. A worker that accepts commands would stop before it runs the
    # tasks that are scheduled after the command.
    runtime_of(d.delays).celery.control.shutdown()
    d.wait_for([d.schedule(delay=0.2) for _ in range(3)], deadline_s=60)
    assert not worker.ended()
    assert "remote shutdown" not in worker.log()


def test_without_a_horizon_a_message_after_the_visibility_timeout_runs_once(deploy: Deploy) -> None:
    """A worker acknowledges a message on receipt, so the broker does not deliver it again."""
    conf = {"broker_transport_options": {"visibility_timeout": 2}}
    d = deploy(conf=conf, **{**UNSWEPT, "horizon": None})
    d.worker()
    ran_once(d, [d.schedule(delay=7) for _ in range(20)])


@pytest.mark.parametrize("timer", ["eta", "redis"])
def test_a_new_timer_loses_and_repeats_no_task(deploy: Deploy, redis_url: str, timer: str) -> None:
    d = deploy("postgresql", "rabbitmq", timer=timer)
    old_worker, old_producer = d.worker(), d.delays
    tasks = [d.schedule(delay=n / 5) for n in range(20)]
    ran_once(d, tasks[:2])

    d.settings["timer"] = redis_url if timer == "eta" else "eta"
    d.worker()
    # Workers of both timers run.
    tasks += [d.schedule(delay=n / 5) for n in range(10)]
    old_worker.terminate()
    # The producer still uses the old timer.
    tasks += [d.schedule(delay=n / 5) for n in range(10)]
    d.delays = d.producer()
    tasks += [d.schedule(delay=n / 5) for n in range(10)]
    ran_once(d, tasks, deadline_s=4 + R1_S + FAULT_SLACK_S)
    old_producer.close()


# -- beat and recurring schedules -----------------------------------------------------------------


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


DECLARED = """
from delaytasks import current_delays, processor
from tests.project import note

@current_delays().recurring(every="1s", body={{"file": {file!r}}})
@processor("test.declared")
def declared(body):
    note(body, "declared")
"""


@pytest.mark.quick
def test_a_worker_runs_what_its_code_declares_and_celery_tasks_that_recur(deploy: Deploy) -> None:
    d = deploy()
    module = d.folder / "declared_schedules_of_test.py"
    module.write_text(DECLARED.format(file=str(d.file)))
    d.conf["imports"] = ["tests.project", module.stem]
    in_the_worker: Any = SimpleNamespace(name="test.celery_note", apply_async=print)
    d.delays.recurring.set("celery", in_the_worker, {"args": [str(d.file)]}, every="1s")
    d.worker("-Q", f"default,{d.conf['task_default_queue']}", pool="solo")

    def have_run() -> bool:
        declared = sum(run == ["declared"] for run in d.runs())
        return min(declared, len(d.runs()) - declared) >= 3

    wait_until(have_run, 30, d.logs, every_s=0.1)
    found = {schedule.name: schedule.is_declared for schedule in d.delays.recurring.list()}
    assert found == {"celery": False, "test.declared": True}
    rows = {str(task.id) for task in d.delays.find(tag="celery:test.celery_note", limit=1000)}
    ids = {run[0] for run in d.runs()} - {"declared"}
    assert ids <= rows, "the message has the id of the row"


# -- Deployments without a broker -----------------------------------------------------------------


@pytest.mark.parametrize("database", ["mysql", "sqlite"])
def test_drain_does_all_the_work_of_a_worker_and_ends(deploy: Deploy, database: str) -> None:
    d = deploy(database, "redis://127.0.0.1:1/0", timer="direct")
    d.delays.policies.pause(tag="test.quiet")
    d.delays.policies.set(tag="test.note", concurrency=1)
    mail = d.schedule("test.mail")
    batch = [d.schedule("test.batch", body={"number": number}) for number in range(0, 20, 2)]
    tags = ["test.wait", "test.async"] * 5
    side_by_side = [d.schedule(tag, body={"seconds": 0.1}) for tag in tags]
    climbing = d.schedule("test.fail", retries="0.1s")
    paused = d.schedule("test.quiet")
    unknown = d.schedule("test.nobody")
    limited = [d.schedule() for _ in range(10)]
    done = [mail, *batch, *side_by_side, *limited]
    first = d.drain("-c", "2", deadline_s=60)
    wait_until(lambda: d.now() > d.delays.get(climbing).expected_time, 10, "the last retry")
    second = d.drain("-c", "2", deadline_s=60)
    d.wait_for(done)
    d.wait_for([climbing], Status.FAILED, 40)
    assert d.delays.get(climbing).runs == 2
    # A worker claims a task without a processor for a moment, again and again.
    rests = {Status.NOT_COMPLETE, Status.HELD}
    wait_until(lambda: {d.status(paused), d.status(unknown)} <= rests, 5, "the others to wait")
    assert [first["succeeded"], first["is_stopped"]] == [len(done), False]
    # The last retry may be due before the first drain ends.
    assert first["failed"] + second["failed"] == 1
    notes = {str(task.id) for task in limited}
    assert sorted(run[0] for run in d.runs() if run[0] in notes) == sorted(notes), "each once"


@pytest.mark.quick
def test_the_direct_timer_makes_no_connection_to_the_broker(deploy: Deploy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        d = deploy(broker=f"redis://127.0.0.1:{mute.getsockname()[1]}/0", timer="direct")
        d.drainer()
        tasks = [d.schedule(delay=n / 50) for n in range(10)]
        d.delays.schedule_many(NewTask("test.quiet", None, delay=0.1) for _ in range(10))
        d.delays.reschedule(tasks[-1], 0.1)
        d.wait_for(tasks)
        d.drain()
        mute.setblocking(False)
        with pytest.raises(BlockingIOError):
            mute.accept()
