"""The conformance suite of every timer on every broker, with real workers.

Timers survive failures of brokers, Redis and workers: no task is lost, and no task runs twice.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from delaytasks import DelayedTask, NewTask
from tests.conftest import closing_all
from tests.proxy import Proxy, proxy_to
from tests.running import BROKERS, QUICK, Deployment
from tests.services import RedisServer
from tests.waiting import IS_LONG, SLACK_S, wait_until
from tests.world import Entry
from tests.world.recording import set_columns

pytestmark = pytest.mark.slow

#: Not `direct`, which keeps no entries and uses no broker: the tests send both.
#: `tests/integration/test_worker.py` and `tests/conformance/test_notices.py` have its tests.
TIMERS = ["eta", "redis"]
#: A caller's transaction stays open for this time after it has scheduled.
OPEN_S = 60.0 if IS_LONG else 0.5
#: With these settings only the timer can run a task in time: no sweep runs, and no late task is
#: left to the table.
ALONE: dict[str, Any] = {"sweep": 60, "_self_sweep_s": 120, "_grace_s": 30, "horizon": 120}


def ran_once(
    d: Deployment, tasks: Sequence[DelayedTask], deadline_s: float = 20
) -> list[DelayedTask]:
    """Return tasks as they are after each one ran once, in time and not early."""
    find = partial(d.delays.find, ids=[task.id for task in tasks], status="DONE", limit=1000)
    what = f"{len(tasks)} tasks to run"
    wait_until(lambda: len(find()) == len(tasks), deadline_s, what, every_s=0.05)
    runs, rows = Counter(run[0] for run in d.runs() if run[1] != "ended"), [*find()]
    for row in rows:
        assert (row.runs, runs[str(row.id)]) == (1, 1), row
        assert row.execution_time is not None
        assert row.execution_time >= row.expected_time, "nothing runs early"
    return rows


def nodes(rows: Sequence[DelayedTask]) -> set[str]:
    """Return the workers that ran these tasks."""
    return {str(row.worker).partition("@")[0] for row in rows}


def burst(d: Deployment, tag: str, many: int, due_s: float = 0.5, **more: Any) -> list[DelayedTask]:
    """Schedule tasks together, all due at the same instant."""
    due, tasks = d.now() + timedelta(seconds=due_s), list[DelayedTask]()
    new = [NewTask(tag, at=due, **more) for _ in range(many)]
    d.delays.schedule_many(new, on_batch=tasks.extend)
    return tasks


#: Each timer with each broker.
COMBINATIONS = [(broker, timer) for broker in BROKERS for timer in TIMERS]


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def d(
    request: Any, tmp_path_factory: pytest.TempPathFactory, postgresql_url: str, redis_url: str
) -> Iterator[Deployment]:
    """Yield a deployment with two workers, which tests share.

    One of them also serves another queue with a single process.
    """
    broker, timer = request.param
    fixture, conf = BROKERS[broker]
    place = (tmp_path_factory.mktemp("timers"), postgresql_url, request.getfixturevalue(fixture))
    timer = redis_url if timer == "redis" else timer
    deployment = Deployment(*place, conf, **ALONE, timer=timer)
    deployment.sweep()  # the next sweep is a minute later
    queue = deployment.settings["namespace"] + ".{}"
    deployment.worker("-Q", queue.format("default"))
    deployment.worker("-Q", queue.format("default") + "," + queue.format("mail"), concurrency=1)
    yield deployment
    deployment.close()


def test_a_burst_at_one_instant_runs_once_each_and_is_shared_by_all_workers(d: Deployment) -> None:
    body = {"file": str(d.file)}
    ran_once(d, burst(d, "test.note", 1000, body=body))
    slow = burst(d, "test.sleep", 80, body={**body, "seconds": 0.1})
    assert nodes(ran_once(d, slow)) == {"w0", "w1"}
    mail = [d.schedule("test.mail", n / 50, queue="mail") for n in range(10)]
    assert nodes(ran_once(d, mail)) == {"w1"}, "only this one serves the queue"


def test_a_task_that_is_committed_after_its_due_time_runs_then(d: Deployment) -> None:
    with Session(d.store.database.tx) as session:
        task = d.schedule(delay=0.1, session=session)
        time.sleep(OPEN_S)  # waits to show that nothing happens
        assert d.now() > task.expected_time
        session.commit()
    began = time.monotonic()
    ran_once(d, [task])
    assert time.monotonic() - began < d.r1_s() + SLACK_S


def test_an_entry_that_is_armed_many_times_in_any_order_runs_once(d: Deployment) -> None:
    tasks = [d.schedule(delay=0.5) for _ in range(5)]
    moved = [d.delays.reschedule(task, 0.6) for task in tasks]
    entries = [Entry.of(task) for task in tasks + moved] * 10
    random.Random(7).shuffle(entries)
    for one in entries:
        assert d.arm([one])
    assert d.arm(entries)
    ran_once(d, tasks)
    ran_once(d, [d.schedule(delay=0.1)])
    ran_once(d, tasks)


#: The slow path runs a task that the timer lost within the grace period, one sweep and the
#: delivery.
R1_S = QUICK["_grace_s"] + QUICK["sweep"] + 2
#: Allowance for a busy machine.
FAULT_SLACK_S = 5


# -- failures of brokers, Redis and workers --------------------------------------------------------


class Rig:
    """A deployment whose broker and Redis can become unreachable or lose their data."""

    def __init__(self, redis: RedisServer, proxies: list[Proxy], deployment: Deployment) -> None:
        self._redis, self._proxies, self.deployment = redis, proxies, deployment

    def all(self, verb: str) -> None:
        """Do something to all proxies."""
        for proxy in self._proxies:
            getattr(proxy, verb)()

    def lose(self) -> None:
        """Delete all messages in the broker and all entries in the timer's Redis."""
        with self.deployment.broker_queue() as queue:
            queue.purge()
        self._redis.client().flushall()

    def close(self) -> None:
        self.all("heal")
        self.deployment.close()
        self.all("close")


Make = Callable[..., Rig]


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def make(request: Any, tmp_path: Path, postgresql_url: str, start_redis: Any) -> Iterator[Make]:
    broker, timer = request.param
    fixture, conf = BROKERS[broker]

    def new(**settings: Any) -> Rig:
        redis = start_redis()
        own = redis.url if broker == "redis" else request.getfixturevalue(fixture), redis.url
        proxies = [proxy_to(url) for url in own]
        url, redis_url = (proxy.url(each) for proxy, each in zip(proxies, own, strict=True))
        settings["timer"] = redis_url if timer == "redis" else timer
        return Rig(redis, proxies, Deployment(tmp_path, postgresql_url, url, conf, **settings))

    with closing_all(new) as make:
        yield make


def test_far_tasks_are_only_rows_until_a_sweep_and_armed_ones_wait_for_a_worker(make: Make) -> None:
    d = make(**ALONE).deployment
    far = burst(d, "test.note", 250, due_s=3600, body={})
    assert messages(d) + d.timer_slots() == []
    # Simulate that an hour passed.
    set_columns(d.store, "tasks", expected_time=d.now() + timedelta(seconds=60))
    d.sweep()  # the next sweep is a minute later
    found = messages(d) + d.timer_slots()
    assert len(found) <= 8, "messages of 100, or slots"
    assert sorted(id for ids in found for id in ids) == sorted(task.id for task in far)
    early = [d.schedule() for _ in range(10)]
    first = d.worker()
    later = [d.schedule(delay=3) for _ in range(20)]
    ran_once(d, [*early, d.schedule()])  # sent after their messages
    first.terminate()
    d.worker()
    ran_once(d, later)


def test_tasks_in_the_memory_of_a_killed_worker_run_after_the_next_sweep(make: Make) -> None:
    d = make().deployment
    first = d.worker()
    held = [d.schedule(delay=3) for _ in range(20)]  # due only after the worker is killed
    ran_once(d, [d.schedule()])  # sent after their messages
    first.kill()
    assert messages(d) == [], "acknowledged on receipt: a broker has nothing to deliver again"
    with d.broker_queue() as queue:  # after its timeout, Redis would deliver such messages again
        redis = queue.channel
        assert not hasattr(redis, "unacked_key") or not redis.client.hlen(redis.unacked_key)
    d.worker()
    ran_once(d, held, deadline_s=3 + R1_S + FAULT_SLACK_S)


def test_tasks_that_the_timer_lost_or_refused_run_after_the_next_sweep(make: Make) -> None:
    rig = make()
    d = rig.deployment
    tasks = [d.schedule(delay=delay_s) for delay_s in (0, 0, 2, 2)]
    rig.lose()
    d.worker()
    ran_once(d, tasks, deadline_s=2 + R1_S + FAULT_SLACK_S)
    tasks = [d.schedule(delay=0.3) for _ in range(5)]
    rig.lose()
    for how in ("swallow", "refuse"):
        rig.all(how)
        began = time.monotonic()
        tasks += [d.schedule(delay=0.2) for _ in range(5)]
        assert time.monotonic() - began < 2, "nobody waits for a broker that is away"
        rig.all("heal")
    ran_once(d, tasks, deadline_s=R1_S + FAULT_SLACK_S)


def messages(d: Deployment) -> list[list[int]]:
    """Take all waiting messages from the broker, and return the ids of each message."""
    found = []
    with d.broker_queue() as queue:
        while (message := queue.get(no_ack=True)) is not None:
            found.append([item[0] for item in message.payload[0][0]])
    return [ids for ids in found if ids]
