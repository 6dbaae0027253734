"""Make real processes fail at each failpoint, and check the recovery times."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from sqlalchemy.orm import Session

from chaos.calls import RECURRING, Caller, body
from chaos.checker import Checker, Finding, Verdict
from chaos.failpoints import (
    EXTRA_RECOVERY_S,
    FAILPOINTS,
    LEASE_S,
    ORDERS,
    Act,
    Failpoint,
    FailpointError,
    Orders,
    write_order,
)
from chaos.history import Answer, CallRecord, Fault, History, Recurs, notebook, now_us, read
from chaos.report import console, show
from chaos.system import Servers, Site, System
from delaytasks import DelayedTask, DelayTasks, NewTask
from delaytasks.db import producer
from delaytasks.model.clock import to_us
from delaytasks.recurring import recurring
from delaytasks.runtime import runtime_of
from delaytasks.worker.quick_loops import is_there
from tests.running import Process

GRACE_S, SWEEP_S, DISPATCH_S = 0.1, 0.5, 2.0
#: Tasks that are due later than the horizon are armed by a sweep.
HORIZON_S = 5.0
SETTINGS: dict[str, Any] = {
    "lease": LEASE_S,
    "sweep": SWEEP_S,
    "_self_sweep_s": 2 * SWEEP_S,
    "_grace_s": GRACE_S,
    "horizon": HORIZON_S,
}
BOUNDS_S = {"R1": GRACE_S + SWEEP_S + DISPATCH_S, "R2": LEASE_S + SWEEP_S + DISPATCH_S}
WORKERS = 2
#: If no process reaches the failpoint in this time, the order is repeated with a lower count.
REACHED_S = 7.0
OVER_S = 20.0
#: From this number of seeds on, each failpoint has a deployment of its own.
MANY_SEEDS = 10
#: The interval of recurring schedules, so that each has one occurrence in a run.
RECURS_S = 86_400
#: The size of one bulk call, the size of its batches, and the number of bulk calls.
MANY, BATCH_ROWS, MANY_CALLS = 5, 2, 2
#: The exit status of a process that was asked to end.
ENDED = 128 + signal.SIGTERM


# -- the calls of a producer in one episode -------------------------------------------------------


class Mix:
    """The calls of one episode, which reach its failpoint."""

    def __init__(self, delays: DelayTasks, seed: int) -> None:
        self._delays, self._chance = delays, random.Random(seed)
        self._caller = Caller(delays, notebook(), self._chance, is_strict=True)

    def make(self, mix: str) -> None:
        uniform = self._chance.uniform
        if mix == "overdue backlog":
            when = runtime_of(self._delays).clock.after(0.3)
            # After quick rows a chunk has many rows, and some of the slow ones are given back.
            for number in range(48):
                self._schedule(None, uniform(0.1, 0.15) if number > 32 else 0, at=when)
            return
        for number in range(self._chance.randint(4, 8)):
            time.sleep(uniform(0, 0.05))
            self._call(mix, number, self._chance.choice([0, uniform(0, 0.8)]))

    def _call(self, mix: str, number: int, delay: float) -> None:
        uniform, schedule, caller = self._chance.uniform, self._schedule, self._caller

        def soon() -> int:
            return schedule(uniform(1, 2))

        calls: dict[str, Callable[[], object]] = {
            "mixed": lambda: self._any(delay),
            "keyed": lambda: schedule(delay, key=f"{now_us()}"),
            "in a session": lambda: schedule(delay, way="committed"),
            "moved": lambda: self._move(soon()),
            "many": lambda: self._schedule_many(number, is_in_session=False),
            "many in a session": lambda: self._schedule_many(number, is_in_session=True),
            "cancelled": lambda: caller.cancel(soon()),
            "retried": lambda: caller.cancel(id := soon()) and caller.rerun(id, delay),
            "touched": lambda: self._delays.touch(soon(), uniform(0.5, 2.5)),
            "not armed": lambda: caller.insert(body()),
            "far": lambda: schedule(uniform(HORIZON_S - 0.3, HORIZON_S + 0.3)),
            "long": lambda: self._any(delay) if number else schedule(delay, uniform(1, 1.5)),
            "fatal": lambda: self._any(delay) if number else schedule(delay, kills=1),
            "simultaneous": lambda: schedule(delay, uniform(0.05, 0.3), tag="side"),
            "queued": self._schedule_together,
            "limited": lambda: schedule(delay / 4, 0.05, tag="limited"),
            "effect": lambda: schedule(delay, tag="effect"),
            "recurring": self._recur,
            "Celery tasks": lambda: caller.call_celery_task(delay + 0.01),
            "revoked Celery tasks":
                lambda: caller.revoke(caller.call_celery_task(uniform(1, 2))[0]),
        }  # fmt: skip
        calls[mix]()

    def _schedule_together(self) -> None:
        """Schedule tasks that are due together, so that some wait in the main process."""
        due = runtime_of(self._delays).clock.after(0.3)
        for _ in range(4):
            self._schedule(None, self._chance.uniform(0.03, 0.06), at=due)

    def _any(self, delay: float) -> None:
        seconds, is_shaky = self._chance.choice([0, 0, 0.03, 0.1]), self._chance.random() < 1 / 3
        fails = self._chance.randint(0, 3) if is_shaky else 0
        self._schedule(delay, seconds, fails, tag="shaky" if is_shaky else "note")

    def _schedule(
        self,
        delay: float | None,
        seconds: float = 0,
        fails: int = 0,
        kills: int = 0,
        tag: str = "note",
        way: str = "alone",
        **options: Any,
    ) -> int:
        id = self._delays.new_id()
        new = NewTask(tag, body(seconds, fails, kills), delay, id=id, **options)
        self._caller.schedule([new], way)
        return id

    def _move(self, id: int) -> None:
        if self._chance.random() < 0.2:
            self._caller.cancel(id)
        else:
            self._caller.reschedule(id, self._chance.uniform(0, 0.5))

    def _schedule_many(self, number: int, is_in_session: bool) -> None:
        """Schedule in several batches, in the first calls of an episode only.

        The ids are made during the call, and must be recorded even if the call fails.
        """
        if number >= MANY_CALLS:
            return
        asked_us, written, uniform = now_us(), list[DelayedTask](), self._chance.uniform
        runtime = runtime_of(self._delays)
        maker, build_tasks = runtime.producer, runtime.producer.build

        def record(tasks: Sequence[DelayedTask], answer: Answer) -> None:
            for task in tasks:
                due_us = to_us(task.expected_time) if answer == "ok" else None
                one = CallRecord(task.id, "schedule", answer, asked_us, now_us(), due_us)
                notebook().note(one)

        def build(asked: Iterable[NewTask], *options: Any) -> list[DelayedTask]:
            made = build_tasks(asked, *options)
            record(made, "unknown")
            return made

        many = [
            NewTask("note", body(), self._chance.choice([0, uniform(0, 0.8)])) for _ in range(MANY)
        ]
        with patch.object(producer, "BULK", BATCH_ROWS), patch.object(maker, "build", build):
            if is_in_session:
                with Session(runtime.store.database.tx) as session, session.begin():
                    self._delays.schedule_many(many, session=session, on_batch=written.extend)
                record(written, "ok")
            else:
                self._delays.schedule_many(many, on_batch=lambda tasks: record(tasks, "ok"))

    def _recur(self) -> None:
        """Store a schedule with a single occurrence in the next hour, of which a sweep makes the
        task."""
        time.sleep(self._chance.uniform(0, 0.6))  # so that several sweeps make the tasks
        name, start = (
            f"s{now_us()}",
            runtime_of(self._delays).clock.after(1 + self._chance.random()),
        )
        with patch.object(recurring.Change, "with_first_tasks", lambda _, schedule: schedule):
            self._delays.recurring.set(name, RECURRING, body(), every=RECURS_S, start=start)


# -- a deployment whose processes fail when ordered to, and are restarted --------------------------


class Part(NamedTuple):
    """Failpoints that are played one after another on one deployment, and its servers."""

    names: list[str]
    seeds: range
    timer: str
    database_url: str
    broker_url: str
    act: Act
    slack_s: float


class FailpointSystem(System):
    def __init__(self, folder: Path, part: Part) -> None:
        url = part.database_url
        if url.startswith("sqlite"):
            url = f"sqlite:///{folder}/failpoints.sqlite3"
        self._part = part
        super().__init__(folder, url, part.broker_url, **SETTINGS, timer=part.timer)
        # Inherited by the processes that are started from now on.
        os.environ.update({**self.environment, ORDERS: str(folder)})
        self._workers: list[Process] = []
        #: The worker that was asked to stop; it stays in the list until it has ended.
        self._stopping: Process | None = None

    def begin(self) -> None:
        self.deployment.delays.policies.set(tag="limited", concurrency=1)
        self.deployment.beat()
        self._workers = [self.deployment.begin_worker() for _ in range(WORKERS)]

    def play(self, failpoint: Failpoint, seed: int) -> bool:
        """Order a process to fail, and return whether one has reached the failpoint."""
        chance, from_us = random.Random(f"{failpoint.name} {seed}"), now_us()
        is_reached, act = False, self._part.act
        for nth in (chance.randint(1, 3), 1, 1):
            self._wait(self._is_ready, 60)  # a worker that was stopped without effect is back
            order = write_order(self.folder, failpoint.name, act, nth)
            child = self._produce(failpoint, chance.randrange(1 << 30))
            if failpoint.special == "stopped":
                self._wait(lambda: False, chance.uniform(0.1, 0.6))
                self._stopping = chance.choice(self._workers)
                self._stopping.signal(signal.SIGTERM)
            is_reached = self._wait(lambda order=order: not order.exists(), REACHED_S)
            _, status = os.waitpid(child, 0)
            assert not os.WIFEXITED(status) or not os.WEXITSTATUS(status), (
                "the producer failed with the exception above"
            )
            if is_reached:
                # Otherwise the next order might hit the other worker before this loss is noticed.
                self._wait(lambda: self._is_carried_out(from_us), REACHED_S)
                break
        order.unlink(missing_ok=True)
        self._wait(self._is_over, OVER_S)
        return is_reached

    def _produce(self, failpoint: Failpoint, seed: int) -> int:
        """Produce in a child process that may be killed, and return its pid."""
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            Orders(self.folder, is_producer=True)
            delays = self.deployment.producer()
            Mix(delays, seed).make(failpoint.mix)
            runtime_of(delays).flush()
        except FailpointError:
            os._exit(0)  # as ordered; the answer of its last call is unknown
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def _is_over(self) -> bool:
        """Return whether no task waits or runs, and each schedule has its task."""
        sweeps = self.deployment.store.sweeps
        return not sweeps.has_due_schedule(OVER_S) and not self.live()

    def _is_ready(self) -> bool:
        is_over = self._stopping not in self._workers
        return is_over and all(" ready." in worker.log() for worker in self._workers)

    def _is_carried_out(self, since_us: int) -> bool:
        new = [fault for fault in self._faults() if fault.from_us >= since_us]
        pids = [int(fault.target.split()[-1]) for fault in new]
        return bool(pids) and (self._part.act != "kill" or not any(map(is_there, pids)))

    def _wait(self, condition: Any, seconds: float) -> bool:
        """Wait for the condition, and restart workers that have ended."""
        ends = time.monotonic() + seconds
        while True:
            for number, worker in enumerate(self._workers):
                if worker.ended():
                    self._workers[number] = self.deployment.begin_worker()
            if condition():
                return True
            if time.monotonic() > ends:
                return False
            time.sleep(0.02)

    def _faults(self) -> list[Fault]:
        """Return the faults that were carried out, with their bounds."""
        found = []
        for fault in read(self.folder / "faults").faults:
            name, _, act = fault.kind.partition(": ")
            slack_s = self._part.slack_s + EXTRA_RECOVERY_S[act]  # type: ignore[index]
            bound = FAILPOINTS[name].bound if name in FAILPOINTS else "R2"
            bounds_s = BOUNDS_S[bound] + slack_s, BOUNDS_S["R2"] + slack_s
            found.append(replace(fault, bounds_s=bounds_s))
        return found

    def verdict(self) -> Verdict:
        self._wait(self._is_delivered, OVER_S)
        history = read(self.notes, self.recorder.changes())
        history.faults = self._faults()
        for fault in history.faults:
            failpoint = FAILPOINTS.get(fault.kind.partition(": ")[0])
            if failpoint is not None and failpoint.special == "refused":
                refuse(history, fault.from_us)
        starts = {
            schedule.name: to_us(schedule.start_at)
            for schedule in self.deployment.delays.recurring.list(limit=1000)
            if schedule.start_at is not None
        }
        history.join(Recurs(name, RECURS_S * 1_000_000, at, at) for name, at in starts.items())
        return Checker(history, quiet_us=now_us()).verdict()

    def _is_delivered(self) -> bool:
        """Return whether all Celery tasks have begun whose messages were published."""
        tasks = read(self.notes).tasks.values()
        return not any(task.published_us and not task.begun_us for task in tasks)


def refuse(history: History, at_us: int) -> None:
    """Record that the interrupted call failed, so that none of its tasks may run."""
    records = [record for task in history.tasks.values() for record in task.calls.values()]
    last_us = max(record.asked_us for record in records if record.asked_us <= at_us)
    for record in records:
        if record.asked_us == last_us and record.answer == "unknown":
            history.note(replace(record, answer="failed"))


def play(part: Part) -> Verdict:
    """Play some failpoints on a deployment in a process of its own."""
    signal.signal(signal.SIGTERM, _end)
    try:
        with tempfile.TemporaryDirectory(prefix="delaytasks-failpoints-") as folder:
            system = FailpointSystem(Path(folder), part)
            try:
                system.begin()
                missed = [
                    Finding("failpoints", "not reached", f"{name}, seed {seed}")
                    for name in part.names
                    for seed in part.seeds
                    if not system.play(FAILPOINTS[name], seed)
                ]
                verdict = system.verdict()
                verdict.findings += missed
                return verdict
            finally:
                system.close()
    except SystemExit:
        # The pool would take SystemExit for a result and start the next part.
        os._exit(ENDED)


def _end(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # during the cleanup
    sys.exit(ENDED)


# -- the command ----------------------------------------------------------------------------------


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=int, default=50, help="number of seeds for each failpoint")
    add("--first", type=int, default=0)
    add("--only", action="append", choices=sorted(FAILPOINTS), metavar="NAME")
    timers = "use only this timer (default: both, alternating between failpoints)"
    add("--timer", choices=["eta", "redis"], help=timers)
    add("--database", choices=["postgresql", "mariadb", "sqlite"], default="postgresql")
    add("--broker", choices=["redis", "rabbitmq"], default="redis")
    add("--worlds", type=int, default=4, help="number of simultaneous deployments")
    add("--act", choices=list(EXTRA_RECOVERY_S), default="kill", help="how the step fails")
    slack = "seconds added to each bound, for a busy machine"
    add("--slack", type=float, default=0, help=slack)


def main(options: Namespace) -> int:
    signal.signal(signal.SIGTERM, _end_all)
    verdict, output = Verdict(), console()
    with tempfile.TemporaryDirectory(prefix="delaytasks-failpoints-") as folder:
        servers = Servers(Path(folder), Site(options.database, options.broker, "redis"))
        try:
            timers = {"eta": "eta", "redis": servers.timer}
            parts = [
                Part(
                    names,
                    range(options.first, options.first + options.seeds),
                    timers[timer],
                    servers.database_url,
                    servers.broker.url,
                    options.act,
                    options.slack,
                )
                for timer, names in shared(options)
            ]
            with ProcessPoolExecutor(options.worlds, mp_context=get_context("spawn")) as pool:
                played = {pool.submit(play, part): part for part in parts}
                for number, done in enumerate(as_completed(played), 1):
                    verdict.add(done.result())
                    names = ", ".join(played[done].names)
                    output.print(f"{number} of {len(parts)}: {names}")
        finally:
            servers.close()
    return show(verdict, output)


def _end_all(*_: object) -> None:
    """End the started processes."""
    for world in active_children():
        world.terminate()
    sys.exit(ENDED)


def shared(options: Namespace) -> list[tuple[str, list[str]]]:
    """Distribute the failpoints over deployments.

    Failpoints that both timers reach alternate between the timers. With many seeds, each failpoint
    has a deployment of its own.
    """
    found: dict[str, list[str]] = {"eta": [], "redis": []}
    for number, failpoint in enumerate(FAILPOINTS.values()):
        if options.only is None or failpoint.name in options.only:
            timers = [each for each in found if options.timer in (None, each)]
            if fitting := [timer for timer in timers if failpoint.fits(timer)]:
                found[fitting[number % len(fitting)]].append(failpoint.name)
    if options.seeds >= MANY_SEEDS:
        return [(timer, [name]) for timer, names in found.items() for name in names]
    parts = [
        (timer, names[number :: options.worlds])
        for timer, names in found.items()
        for number in range(options.worlds)
    ]
    return [(timer, names) for timer, names in parts if names]
