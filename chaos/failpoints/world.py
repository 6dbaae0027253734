"""A deployment whose processes fail when ordered to, and are restarted."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from chaos.celery_messages import NOTES, TAG, use_row_ids
from chaos.checker import Checker, Verdict
from chaos.failpoints import orders
from chaos.failpoints.calls import HORIZON_S, RECURRING_TAG, RECURS_S, FailpointCalls
from chaos.failpoints.catalogue import BY_NAME, Failpoint
from chaos.failpoints.orders import LEASE_S, VARIABLE, Act, FailpointError, Orders
from chaos.history import History, Occurrences, RowChange, read
from chaos.occurrences import read_occurrences
from chaos.project import now_us, time_environment
from chaos.recorder import Recorder
from chaos.rows import rows_of
from delaytasks.model.clock import to_us
from delaytasks.model.moves import FINISHED, LIVE, Status
from delaytasks.runtime import runtime_of
from delaytasks.worker.quick_loops import is_there
from tests.running import Deployment, Process

GRACE_S, SWEEP_S, DISPATCH_S = 0.1, 0.5, 2.0
SETTINGS: dict[str, Any] = {
    "lease": LEASE_S,
    "sweep": SWEEP_S,
    "_self_sweep_s": 2 * SWEEP_S,
    "_grace_s": GRACE_S,
    "horizon": HORIZON_S,
}
BOUNDS_S = {
    "R1": GRACE_S + SWEEP_S + DISPATCH_S,
    "R2": LEASE_S + SWEEP_S + DISPATCH_S,
    "D": DISPATCH_S,
}
WORKERS = 2
#: If no process reaches the failpoint in this time, the order is repeated with a lower count.
REACHED_S = 7.0
OVER_S = 20.0


@dataclass
class Episode:
    """One order and its effects."""

    failpoint: str
    seed: int
    from_us: int
    until_us: int = 0
    is_reached: bool = False
    #: The recovery time of the task that came nearest to its bound, and that bound. The bound is R2
    #: for tasks whose worker died during a claim.
    recovery_s: float = 0.0
    bound_s: float = 0.0
    #: The number of unfinished tasks.
    left: int = 0
    #: The story of the task that came nearest to its bound.
    story: str = ""

    def is_late(self, slack_s: float) -> bool:
        return self.recovery_s > self.bound_s + slack_s


class FailpointDeployment:
    def __init__(
        self, folder: Path, database_url: str, broker_url: str, timer: str, redis_url: str
    ) -> None:
        self._folder = folder
        (folder / "notes").mkdir()
        # Inherited by the processes that are started from now on.
        os.environ.update(
            {VARIABLE: str(folder), NOTES: str(folder / "notes"), **time_environment()}
        )
        conf = {"imports": ["chaos.failpoints.project", "chaos.celery_messages"]}
        settings = {**SETTINGS, "timer": redis_url if timer == "redis" else timer}
        self._deployment = Deployment(folder, database_url, broker_url, conf, **settings)
        self._store = self._deployment.store
        self._deployment.delays.policies.set(tag="fail.limited", concurrency=1)
        self._recorder = Recorder(self._store)
        self._workers: list[Process] = []
        #: The worker that was asked to stop; it stays in the list until it has ended.
        self._stopping: Process | None = None

    def begin(self) -> None:
        self._recorder.start()
        self._beat = self._deployment.beat()
        self._workers = [self._deployment.begin_worker() for _ in range(WORKERS)]

    def close(self) -> None:
        try:
            self._recorder.stop()
        finally:
            self._deployment.close()

    # -- one order --------------------------------------------------------------------------------

    def play(self, failpoint: Failpoint, seed: int, act: Act) -> Episode:
        chance = random.Random(f"{failpoint.name} {seed}")
        episode = Episode(failpoint.name, seed, now_us())
        for nth in (chance.randint(1, 3), 1, 1):
            self._wait(self._is_ready, 60)  # a worker that was stopped without effect is back
            order = orders.write_order(self._folder, failpoint.name, act, nth)
            producer = self._produce(failpoint, chance.randrange(1 << 30))
            if failpoint.is_stopped:
                self._wait(lambda: False, chance.uniform(0.1, 0.6))
                self._stopping = chance.choice(self._workers)
                self._stopping.signal(signal.SIGTERM)
            episode.is_reached = self._wait(lambda order=order: not order.exists(), REACHED_S)
            _, status = os.waitpid(producer, 0)
            assert not os.WIFEXITED(status) or not os.WEXITSTATUS(status), (
                "the producer failed with the exception above"
            )
            if episode.is_reached:
                # Otherwise the next order might hit the other worker before this loss is noticed.
                self._wait(lambda: self._is_carried_out(act, episode.from_us), REACHED_S)
                break
        order.unlink(missing_ok=True)
        self._wait(lambda: not self._live(), OVER_S)
        episode.left, episode.until_us = self._live(), now_us()
        return episode

    def _produce(self, failpoint: Failpoint, seed: int) -> int:
        """Produce in a child process that may be killed, and return its pid."""
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            Orders(self._folder, is_producer=True)
            delays = self._deployment.producer()
            FailpointCalls(delays, self._folder / "notes", seed).make(failpoint.mix)
            runtime_of(delays).flush()
        except FailpointError:
            os._exit(0)  # as ordered; the answer of its last call is unknown
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _is_ready(self) -> bool:
        return self._stopping not in self._workers and all(
            " ready." in worker.log() for worker in self._workers
        )

    def _is_carried_out(self, act: Act, since_us: int) -> bool:
        pids = [
            int(fault.target.split()[-1])
            for fault in orders.faults(self._folder)
            if fault.from_us >= since_us
        ]
        return bool(pids) and (act != "kill" or not any(map(is_there, pids)))

    def _live(self) -> int:
        t = self._store.schema.tasks
        live = select(func.count()).where(t.c.status.in_([int(status) for status in LIVE]))
        return int(self._store.database.autocommitted(lambda c: c.execute(live).scalar_one()))

    def _wait(self, condition: Any, seconds: float) -> bool:
        """Wait for the condition, and restart workers that have ended."""
        ends = time.monotonic() + seconds
        while True:
            for number, worker in enumerate(self._workers):
                if worker.ended():
                    self._workers[number] = self._deployment.begin_worker()
            if condition():
                return True
            if time.monotonic() > ends:
                return False
            time.sleep(0.02)

    # -- results ----------------------------------------------------------------------------------

    def verdict(self, episodes: list[Episode]) -> Verdict:
        """Check the history, and set the recovery times of the episodes."""
        self._wait(lambda: not self._undelivered(), OVER_S)
        history = self._history()
        history.faults = orders.faults(self._folder)
        checker = Checker(history, quiet_us=now_us())
        ended_us = {(ran.id, ran.version): ran.ended_us or 0 for ran in history.run_records}
        for episode in episodes:
            faults = [
                fault for fault in history.faults if fault.kind.startswith(f"{episode.failpoint}: ")
            ]
            fault = next(
                (f for f in faults if episode.from_us <= f.from_us <= episode.until_us), None
            )
            episode.is_reached = fault is not None
            if fault is not None:
                late = {
                    c: late_s(c, fault.from_us, ended_us)
                    for c in history.changes
                    if fault.from_us < c.at_us <= episode.until_us
                }
                if late:
                    bounds = {
                        c: BOUNDS_S["R2" if c.lapses else BY_NAME[episode.failpoint].bound]
                        for c in late
                    }
                    worst = max(late, key=lambda c: late[c] - bounds[c])
                    episode.recovery_s, episode.bound_s = late[worst], bounds[worst]
                    episode.story = checker.story(worst.id)
                if BY_NAME[episode.failpoint].is_refused:
                    refuse(history, fault.from_us)
        return checker.verdict()

    def _history(self) -> History:
        history = read(self._folder / "notes", self._recorder.changes())
        delays = self._deployment.delays
        use_row_ids(history, rows_of(delays, TAG))
        found = read_occurrences(history, rows_of(delays, RECURRING_TAG))
        for schedule in delays.recurring.list(limit=1000):
            assert schedule.start_at is not None
            at_us = to_us(schedule.start_at)
            history.occurrences.append(
                Occurrences(
                    schedule.name, RECURS_S * 1_000_000, at_us, at_us, found.get(schedule.name, [])
                )
            )
        return history

    def _undelivered(self) -> set[int]:
        """Return the rows whose messages were published, and whose Celery tasks have not begun."""
        history = read(self._folder / "notes", ())
        return {each.id for each in history.publications} - {each.id for each in history.deliveries}


def late_s(change: RowChange, fault_us: int, ended_us: Mapping[tuple[int, int], int]) -> float:
    """Return how late a run began or a task was finished after the fault, in seconds."""
    if change.status is Status.CANCELLED:
        return 0  # a producer cancelled the task
    if change.status in FINISHED:
        ended = ended_us.get((change.id, change.version_was or 0), 0)
        return (change.at_us - max(change.due_us, fault_us, ended)) / 1e6
    if change.status is Status.RUNNING and change.version != change.version_was:
        return (change.at_us - max(change.due_us, fault_us)) / 1e6
    return 0


def refuse(history: History, at_us: int) -> None:
    """Record that the interrupted call failed, so that none of its tasks may run."""
    asked = [record for record in history.call_records if record.asked_us <= at_us]
    last_us = max(record.asked_us for record in asked)
    history.call_records = [
        replace(record, answer="failed") if record.asked_us == last_us else record
        for record in history.call_records
    ]
