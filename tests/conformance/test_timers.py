"""The conformance suite of every timer on every broker, with real workers.

Timers survive failures of brokers, Redis and workers: no task is lost, and no task runs twice.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from delaytasks import DelayedTask, NewTask, Status
from tests.conftest import closing_all
from tests.proxy import proxy_to
from tests.running import BROKERS, QUICK, Deployment
from tests.services import RedisServer
from tests.waiting import IS_LONG, SLACK_S, wait_until
from tests.world import Entry
from tests.world.recording import set_columns

pytestmark = pytest.mark.slow

#: Not `direct`, which keeps no entries and uses no broker: the tests send both.
#: `tests/integration/test_direct.py` and `tests/conformance/test_notices.py` have its tests.
TIMERS = ["eta", "redis"]
#: A caller's transaction stays open for this time after it has scheduled.
OPEN_S = 60.0 if IS_LONG else 0.5
#: With these settings only the timer can run a task in time: no sweep runs, and no late task is
#: left to the table.
ALONE: dict[str, Any] = {"sweep": 60, "_self_sweep_s": 120, "_grace_s": 30, "horizon": 120}


class Row(NamedTuple):
    id: int
    status: int
    runs: int
    expected_time: datetime
    execution_time: datetime | None
    worker: str | None

    @property
    def node(self) -> str:
        return (self.worker or "").partition("@")[0]


def read(d: Deployment, tasks: Iterable[DelayedTask]) -> list[Row]:
    t = d.store.schema.tasks
    query = (
        select(*(t.c[name] for name in Row._fields))
        .where(t.c.id.in_([task.id for task in tasks]))
        .order_by(t.c.id)
    )
    with d.store.database.auto.connect() as connection:
        return [Row(*row) for row in connection.execute(query)]


def ran_once(d: Deployment, tasks: Sequence[DelayedTask], deadline_s: float = 20) -> list[Row]:
    """Return the rows of tasks after each one ran once, in time and not early."""

    def is_over() -> bool:
        return all(row.status == Status.DONE for row in read(d, tasks))

    wait_until(is_over, deadline_s, f"{len(tasks)} tasks to run", every_s=0.02)
    runs, rows = Counter(run[0] for run in d.runs() if run[1] != "ended"), read(d, tasks)
    for row in rows:
        assert (row.runs, runs[str(row.id)]) == (1, 1), row
        assert row.execution_time is not None
        assert row.execution_time >= row.expected_time, "nothing runs early"
    return rows


def burst(d: Deployment, tag: str, many: int, due_s: float = 0.5, **more: Any) -> list[DelayedTask]:
    """Schedule tasks together, all due at the same instant."""
    due, tasks = d.now() + timedelta(seconds=due_s), list[DelayedTask]()
    new = [NewTask(tag, at=due, **more) for _ in range(many)]
    d.delays.schedule_many(new, on_batch=tasks.extend)
    return tasks


def entry(task: DelayedTask, **changes: Any) -> Entry:
    return Entry.of(task)._replace(**changes)


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


def test_a_burst_at_one_instant_runs_once_each(d: Deployment) -> None:
    ran_once(d, burst(d, "test.note", 1000, body={"file": str(d.file)}))


def test_all_workers_share_a_burst_of_tasks_that_take_a_while(d: Deployment) -> None:
    rows = ran_once(d, burst(d, "test.sleep", 80, body={"file": str(d.file), "seconds": 0.1}))
    assert {row.node for row in rows} == {"w0", "w1"}


def test_a_task_that_is_committed_after_its_due_time_runs_then(d: Deployment) -> None:
    with Session(d.store.database.tx) as session:
        task = d.schedule(delay=0.1, session=session)
        time.sleep(OPEN_S)  # waits to show that nothing happens
        assert d.now() > task.expected_time
        session.commit()
    began = time.monotonic()
    ran_once(d, [task])
    assert time.monotonic() - began < d.r1_s() + SLACK_S


def test_tasks_reach_only_workers_that_serve_their_queue(d: Deployment) -> None:
    mail = [d.schedule("test.mail", n / 50, queue="mail") for n in range(10)]
    assert {row.node for row in ran_once(d, mail)} == {"w1"}


def test_an_entry_that_is_armed_many_times_in_any_order_runs_once(d: Deployment) -> None:
    tasks = [d.schedule(delay=0.5) for _ in range(5)]
    moved = [d.delays.reschedule(task, 0.6) for task in tasks]
    entries = [entry(task) for task in tasks + moved] * 10
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
    """A deployment whose broker and optional timer Redis can become unreachable or lose their
    data."""

    def __init__(
        self,
        folder: Path,
        database: str,
        broker: str,
        url: str,
        redis: RedisServer,
        **settings: Any,
    ) -> None:
        self._redis = redis
        own = (url, redis.url)
        self._proxies = [proxy_to(each) for each in own]
        urls = [proxy.url(each) for proxy, each in zip(self._proxies, own, strict=True)]
        if settings.get("timer") == "redis":
            settings["timer"] = urls[1]
        self.deployment = Deployment(folder, database, urls[0], BROKERS[broker][1], **settings)

    def away(self, how: str) -> None:
        for proxy in self._proxies:
            getattr(proxy, how)()

    def heal(self) -> None:
        for proxy in self._proxies:
            proxy.heal()

    def lose(self) -> None:
        """Delete all messages in the broker and all entries in the timer's Redis."""
        d = self.deployment
        with d.broker_queue() as queue:
            queue.purge()
        self._redis.client().flushall()

    def close(self) -> None:
        self.heal()
        self.deployment.close()
        for proxy in self._proxies:
            proxy.close()


Make = Callable[..., Rig]


@pytest.fixture(params=COMBINATIONS, ids="-".join)
def make(request: Any, tmp_path: Path, postgresql_url: str, start_redis: Any) -> Iterator[Make]:
    broker, timer = request.param

    def new(**settings: Any) -> Rig:
        redis = start_redis()
        url = redis.url if broker == "redis" else request.getfixturevalue(BROKERS[broker][0])
        return Rig(tmp_path, postgresql_url, broker, url, redis, timer=timer, **settings)

    with closing_all(new) as make:
        yield make


def test_armed_tasks_wait_for_a_worker_and_survive_the_stop_of_a_worker(make: Make) -> None:
    d = make(**ALONE).deployment
    d.sweep()  # the next sweep is a minute later
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
    assert unacknowledged(d) == 0, "nor has Celery's of Redis"
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
        rig.away(how)
        began = time.monotonic()
        tasks += [d.schedule(delay=0.2) for _ in range(5)]
        assert time.monotonic() - began < 2, "nobody waits for a broker that is away"
        rig.heal()
    ran_once(d, tasks, deadline_s=R1_S + FAULT_SLACK_S)


def test_far_tasks_are_only_rows_until_a_sweep_arms_them_in_batches(make: Make) -> None:
    d = make(**ALONE).deployment

    def waiting() -> list[list[int]]:
        return messages(d) + d.timer_slots()

    far = burst(d, "test.note", 250, due_s=3600, body={})
    assert waiting() == []
    # Simulate that an hour passed.
    set_columns(d.store, "tasks", expected_time=d.now() + timedelta(seconds=60))
    d.sweep()
    found = waiting()
    assert len(found) <= 8, "messages of 100, or slots"
    assert sorted(id for ids in found for id in ids) == sorted(task.id for task in far)


def messages(d: Deployment) -> list[list[int]]:
    """Take all waiting messages from the broker, and return the ids of each message."""
    found = []
    with d.broker_queue() as queue:
        while (message := queue.get(no_ack=True)) is not None:
            found.append([item[0] for item in message.payload[0][0]])
    return [ids for ids in found if ids]


def unacknowledged(d: Deployment) -> int:
    """Return how many messages Redis would redeliver after its visibility timeout.

    Brokers that detect a closed connection have already redelivered them.
    """
    with d.broker_queue() as queue:
        redis = queue.channel
        return int(redis.client.hlen(redis.unacked_key)) if hasattr(redis, "unacked_key") else 0
