"""What every timer must do on every broker: `test_timers_on_….py` runs it, with real workers."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
from sqlalchemy import update
from sqlalchemy.orm import Session

from delaytasks import DelayTask, Status
from delaytasks.core.clock import to_us
from delaytasks.core.ports import Entry
from delaytasks.store.types import db_now_plus
from tests.proxy import proxy_to
from tests.redis_server import RedisServer
from tests.running import BROKERS, QUICK, Deployment
from tests.waiting import wait_until

TIMERS = ["eta"]
#: With these nothing but the timer can bring a task in time: no sweep, and nothing late that is left to the table.
ALONE: dict[str, Any] = {"sweep_s": 60, "self_sweep_s": 120, "grace_s": 30, "horizon_s": 120}
#: The grace, a sweep and the way to a worker: when the slow path has what the timer lost.
R1_S = QUICK["grace_s"] + QUICK["sweep_s"] + 2
#: The machine's own share, when it is busy.
SLACK_S = 5


def ran_once(d: Deployment, tasks: Iterable[DelayTask], deadline_s: float = 20) -> list[DelayTask]:
    """The rows of tasks that ran in time, each once and none early."""
    tasks = list(tasks)
    d.wait_for(tasks, deadline_s=deadline_s)
    runs, rows = Counter(run[0] for run in d.runs()), [d.delays.get(task) for task in tasks]
    assert {row.id: row.attempts for row in rows if row.attempts != 1} == {}
    assert {task.id: runs[str(task.id)] for task in tasks if runs[str(task.id)] != 1} == {}
    assert min(late_s(row) for row in rows) >= 0, "nothing runs early"
    return rows


def late_s(row: DelayTask) -> float:
    assert row.execution_time is not None
    return (row.execution_time - row.expected_time).total_seconds()


def entry(task: DelayTask, **changes: Any) -> Entry:
    return Entry.of(task, to_us)._replace(**changes)


def node(row: DelayTask) -> str:
    return (row.worker or "").partition("@")[0]


class Timers:
    """Tests share two workers, of which one serves another queue as well, with a single process."""

    broker: ClassVar[str]

    @pytest.fixture(scope="class", params=TIMERS)
    @classmethod
    def d(
        cls, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, postgresql_url: str
    ) -> Iterator[Deployment]:
        fixture, conf = BROKERS[cls.broker]
        broker_url = request.getfixturevalue(fixture)
        deployment = Deployment(tmp_path_factory.mktemp("timers"), postgresql_url, broker_url, conf, **ALONE)
        deployment.delays.sweeper.sweep()  # the last one for a minute
        queue = deployment.settings["namespace"] + ".{}"
        deployment.worker("-Q", queue.format("default"))
        deployment.worker("-Q", queue.format("default") + "," + queue.format("mail"), concurrency=1)
        yield deployment
        deployment.close()

    def test_tasks_run_once_and_never_early(self, d: Deployment) -> None:
        ran_once(d, [d.schedule(delay=n / 50) for n in range(50)])

    def test_a_burst_runs_once_each_and_all_workers_help(self, d: Deployment) -> None:
        due, tasks = d.delays.clock.now() + timedelta(seconds=1), []
        body = {"file": str(d.file)}
        d.delays.schedule_many((("test.note", body, due) for _ in range(400)), on_batch=tasks.extend)
        rows = ran_once(d, tasks)
        assert {node(row) for row in rows} == {"w0", "w1"}

    def test_many_tasks_that_wait_do_not_hold_up_one_that_is_due(self, d: Deployment) -> None:
        waiting: list[DelayTask] = []
        d.delays.schedule_many((("test.quiet", {}, 100) for _ in range(1000)), on_batch=waiting.extend)
        for task in waiting:
            d.delays.timer.arm([entry(task)])  # also as if each had been scheduled by itself
        ran_once(d, [d.schedule(delay=0.3)])
        assert d.status(waiting[0]) is Status.NOT_COMPLETE

    def test_a_cancelled_task_does_not_run(self, d: Deployment) -> None:
        task, after = d.schedule(delay=0.5), d.schedule(delay=0.7)
        assert d.delays.cancel(task)
        ran_once(d, [after])
        assert did_not_run(d, task).status is Status.CANCELLED

    def test_a_task_that_is_rescheduled_for_later_runs_at_the_new_time_only(self, d: Deployment) -> None:
        task = d.schedule(delay=0.4)
        later = d.delays.reschedule(task, 1)
        [row] = ran_once(d, [task])
        assert row.expected_time == later.expected_time

    @pytest.mark.parametrize("delay_s", [30, 3600], ids=["near", "far"])
    def test_a_task_that_is_rescheduled_for_earlier_runs_then(self, d: Deployment, delay_s: float) -> None:
        task = d.schedule(delay=delay_s)
        d.delays.reschedule(task, 0.5)
        ran_once(d, [task])

    def test_a_replaced_task_runs_once_with_the_new_body_at_the_new_time(self, d: Deployment) -> None:
        for first_s, second_s in ((0.4, 0.8), (30, 0.5)):
            key = f"replaced after {first_s}"
            d.schedule("test.word", first_s, key=key, body={"word": "old"})
            task = d.schedule("test.word", second_s, key=key, on_conflict="replace", body={"word": "new"})
            ran_once(d, [task])
            assert [run[1] for run in d.runs() if run[0] == str(task.id)] == ["new"]

    def test_a_touched_task_runs_once_when_it_is_left_alone(self, d: Deployment) -> None:
        task = d.schedule(delay=0.4)
        for delay_s in (0.6, 0.8, 1):
            assert d.delays.touch(task, delay_s)
        [row] = ran_once(d, [task])
        assert (row.expected_time - task.expected_time).total_seconds() > 0.5

    def test_what_its_caller_rolled_back_does_not_run(self, d: Deployment) -> None:
        engine = d.store.database.tx
        with Session(engine) as session:
            task = d.schedule(delay=0.2, session=session)
            session.rollback()
        with engine.connect() as connection:
            other = d.schedule(delay=0.2, session=connection)
            connection.rollback()
        ran_once(d, [d.schedule(delay=0.4)])
        assert {str(task.id), str(other.id)}.isdisjoint(run[0] for run in d.runs())

    def test_of_two_priorities_the_higher_one_runs_first(self, d: Deployment) -> None:
        d.schedule("test.sleep", 0, queue="mail", body={"seconds": 1})
        wait_until(lambda: d.runs()[-1][1] == "began", 10, "the sleeper to begin")
        due = d.delays.clock.now() + timedelta(seconds=0.3)
        body = {"file": str(d.file)}
        low, high = (
            [d.delays.schedule_at("test.note", body, due, queue="mail", priority=priority) for _ in range(5)]
            for priority in (1, 8)
        )
        ran_once(d, low + high)
        order = [run[0] for run in d.runs()]
        assert max(order.index(str(task.id)) for task in high) < min(order.index(str(task.id)) for task in low)

    def test_tasks_reach_only_workers_that_serve_their_queue(self, d: Deployment) -> None:
        mail = [d.schedule("test.mail", n / 20, queue="mail") for n in range(10)]
        assert {node(row) for row in ran_once(d, mail)} == {"w1"}

    def test_an_entry_that_is_armed_many_times_in_any_order_runs_once(self, d: Deployment) -> None:
        tasks = [d.schedule(delay=0.8) for _ in range(5)]
        moved = [d.delays.reschedule(task, 1) for task in tasks]
        entries = [entry(task) for task in tasks + moved] * 10
        random.Random(7).shuffle(entries)
        for one in entries:
            assert d.delays.timer.arm([one])
        assert d.delays.timer.arm(entries)
        ran_once(d, tasks)
        ran_once(d, [d.schedule(delay=0.3)])
        ran_once(d, tasks)

    def test_a_forged_entry_runs_nothing(self, d: Deployment) -> None:
        waits, cancelled, soon = d.schedule(delay=40), d.schedule(delay=40), d.schedule(delay=1)
        d.delays.cancel(cancelled)
        now_us = d.delays.clock.now_us()
        d.delays.timer.arm(
            [
                entry(waits, due_us=now_us),
                entry(soon, due_us=now_us),
                entry(soon, due_us=now_us, version=soon.version + 7),
                entry(cancelled, due_us=now_us),
                entry(cancelled, due_us=now_us, version=cancelled.version + 1),
                entry(waits, due_us=now_us, id=2**62),
                entry(waits, due_us=now_us, id=1),
            ]
        )
        ran_once(d, [soon])
        did_not_run(d, waits)
        did_not_run(d, cancelled)


def did_not_run(d: Deployment, task: DelayTask) -> DelayTask:
    row = d.delays.get(task)
    assert (row.attempts, row.execution_time) == (0, None)
    assert str(task.id) not in [run[0] for run in d.runs()]
    return row


class Rig:
    """A deployment whose broker, and the Redis that the timer may have besides, can go away or lose what they hold."""

    def __init__(
        self, folder: Path, database_url: str, broker: str, broker_url: str, redis: RedisServer | None, **settings: Any
    ) -> None:
        self._redis = redis
        self._proxies = [proxy_to(broker_url)]
        self.deployment = Deployment(
            folder, database_url, self._proxies[0].url(broker_url), BROKERS[broker][1], **settings
        )

    def away(self, how: str) -> None:
        for proxy in self._proxies:
            getattr(proxy, how)()

    def heal(self) -> None:
        for proxy in self._proxies:
            proxy.heal()

    def lose(self) -> None:
        """All that waits in the broker and in the timer's Redis."""
        d = self.deployment
        if self._redis is not None:
            self._redis.client().flushall()
        with d.delays.celery.connection_for_write() as connection:
            d.delays.publisher.queue("default")(connection).purge()

    def close(self) -> None:
        self.heal()
        self.deployment.close()
        for proxy in self._proxies:
            proxy.close()


Make = Callable[..., Rig]


class TimersUnderFaults:
    """Each test breaks a deployment of its own."""

    broker: ClassVar[str]

    @pytest.fixture(params=TIMERS)
    def make(
        self,
        request: pytest.FixtureRequest,
        tmp_path: Path,
        postgresql_url: str,
        start_redis: Callable[[], RedisServer],
    ) -> Iterator[Make]:
        made: list[Rig] = []

        def new(**settings: Any) -> Rig:
            redis = start_redis() if self.broker == "redis" else None
            url = request.getfixturevalue(BROKERS[self.broker][0]) if redis is None else redis.url
            made.append(Rig(tmp_path, postgresql_url, self.broker, url, redis, **settings))
            return made[-1]

        yield new
        for rig in made:
            rig.close()

    def test_what_is_armed_waits_for_a_worker_and_outlives_one_that_is_stopped(self, make: Make) -> None:
        d = make(**ALONE).deployment
        d.delays.sweeper.sweep()  # the last one for a minute
        later, now = ([d.schedule(delay=delay_s) for _ in range(10)] for delay_s in (5, 0))
        first = d.worker()
        ran_once(d, now)
        first.terminate()
        d.worker()
        ran_once(d, later)

    def test_what_a_killed_worker_held_runs_by_the_next_sweep(self, make: Make) -> None:
        d = make().deployment
        first = d.worker()
        held = [d.schedule(delay=2) for _ in range(20)]
        ran_once(d, [d.schedule()])  # its message came after theirs
        first.kill()
        d.worker()
        ran_once(d, held, deadline_s=2 + R1_S + SLACK_S)

    def test_what_was_scheduled_while_the_broker_was_away_runs_by_the_next_sweep(self, make: Make) -> None:
        rig = make()
        d = rig.deployment
        d.worker()
        ran_once(d, [d.schedule()])
        for how in ("refuse", "swallow"):
            rig.away(how)
            began = time.monotonic()
            tasks = [d.schedule(delay=0.2) for _ in range(5)]
            assert time.monotonic() - began < 2
            rig.heal()
            ran_once(d, tasks, deadline_s=R1_S + SLACK_S)

    def test_what_the_timer_lost_runs_by_the_next_sweep(self, make: Make) -> None:
        rig = make()
        d = rig.deployment
        lost = [d.schedule(delay=delay_s) for delay_s in (0, 0, 3, 3)]
        rig.lose()
        d.worker()
        ran_once(d, lost, deadline_s=3 + R1_S + SLACK_S)
        lost = [d.schedule(delay=0.3) for _ in range(5)]
        rig.lose()
        ran_once(d, lost, deadline_s=R1_S + SLACK_S)

    def test_far_tasks_are_rows_only_until_a_sweep_arms_them_many_to_a_message(self, make: Make) -> None:
        d = make(**ALONE).deployment
        far: list[DelayTask] = []
        d.delays.schedule_many((("test.note", {}, 3600) for _ in range(250)), on_batch=far.extend)
        assert messages(d) == []
        t = d.store.schema.tasks
        with d.store.database.begin() as connection:  # as if it were an hour later
            connection.execute(update(t).values(expected_time=db_now_plus(60)))
        d.delays.sweeper.sweep()
        found = messages(d)
        assert sorted(map(len, found)) == [50, 100, 100]
        assert {id for ids in found for id in ids} == {task.id for task in far}


def messages(d: Deployment) -> list[list[int]]:
    """Takes out what waits in the broker: the ids of each message."""
    found = []
    with d.delays.celery.connection_for_write() as connection:
        queue = d.delays.publisher.queue("default")(connection)
        queue.declare()
        while (message := queue.get(no_ack=True)) is not None:
            found.append([entry[0] for entry in message.payload[0][0]])
    return found
