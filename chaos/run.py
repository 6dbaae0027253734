"""Execute one run: schedule tasks, inject random faults, and read the history at the end."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from chaos.celery_load import CeleryLoad
from chaos.celery_messages import TAG, use_row_ids
from chaos.history import ALL, Fault, History, read
from chaos.nemeses import NEMESES, Nemesis, Victim
from chaos.producers import PRODUCERS, ChaosProducer
from chaos.project import now_us
from chaos.recurring import RecurringLoad
from chaos.rows import rows_of
from chaos.system import SystemUnderTest
from delaytasks.model.errors import DelayTaskError
from tests.waiting import STACKS

Say = Callable[[str], object]
#: A pause of the whole machine of this length is recorded as a fault that explains late tasks.
STALL_S = 0.5
STALL = "the machine stalled"
#: In addition to the tasks of processors, one Celery task is called for this number of tasks.
ONE_CELERY_TASK_IN = 10
#: A call to the workers takes long while the broker is away.
CELERY_PRODUCERS = 2


class Plan(NamedTuple):
    seed: int
    tasks: int
    faults: int
    #: The minimum number of kills among the faults.
    kills: int
    #: Seconds from one fault to the next.
    every: float
    #: Seconds without progress after the last fault, after which the run ends.
    patience: float
    #: Seconds after the last fault in which all due tasks have to finish.
    within: float
    #: Words in the names of the selected faults.
    only: tuple[str, ...] = ("",)

    @property
    def seconds(self) -> float:
        return max(self.faults, 1) * self.every

    @property
    def most_seconds(self) -> float:
        """A busy machine gets at most twice the time."""
        return 2 * self.seconds + 60


class RunOutcome(NamedTuple):
    history: History
    #: The time when no task waited any more. The search for hung processes follows.
    over_us: int
    #: The deadline of the tasks that were due before.
    by_us: int
    #: The time by which all work must be over.
    quiet_us: int


def run(system: SystemUnderTest, plan: Plan, say: Say) -> RunOutcome:
    chance = random.Random(plan.seed)
    each = -(-plan.tasks // PRODUCERS)
    producers = [
        ChaosProducer(system, plan.seed + n, each, each / plan.seconds) for n in range(PRODUCERS)
    ]
    recurring = RecurringLoad(system)
    celery_tasks = -(-plan.tasks // ONE_CELERY_TASK_IN // CELERY_PRODUCERS)
    celery = [
        CeleryLoad(system, plan.seed + n, celery_tasks, celery_tasks / plan.seconds)
        for n in range(CELERY_PRODUCERS)
    ]
    stalls = Stalls()
    faults = _strike(
        system, plan, chance, lambda: sum(producer.count for producer in producers), say
    )
    until = time.monotonic() + plan.most_seconds - plan.seconds
    for producer in producers:
        producer.thread.wait(max(until - time.monotonic(), 0))
        producer.stop()
    for load in celery:
        load.stop()
    recurring.stop()
    say(
        f"{sum(producer.count for producer in producers):,} tasks scheduled; the last fault is over"
    )
    began = time.monotonic()
    by_us = max((fault.until_us for fault in faults), default=now_us()) + int(plan.within * 1e6)
    # Waiting beyond the deadline distinguishes late tasks from stuck ones.
    left = wait_for_quiet(system, plan.patience, max((by_us - now_us()) / 1e6, 0) + plan.patience)
    say(f"{left} of them still wait {time.monotonic() - began:.1f} s later")
    over_us = now_us()
    hung = find_hung(system, plan.patience)
    quiet_us = now_us()
    history = read(system.notes, system.recorder.changes())
    history.hung = hung
    use_row_ids(history, rows_of(system.deployment.delays, TAG))
    recurring.read(history)
    history.faults += sorted(faults + stalls.end(), key=lambda fault: fault.from_us)
    return RunOutcome(history, over_us, by_us, quiet_us)


def _strike(
    system: SystemUnderTest, plan: Plan, chance: random.Random, count: Callable[[], int], say: Say
) -> list[Fault]:
    """Inject the faults.

    Each component has at most one fault at a time; several components may have one.
    """
    fitting = [
        n for n in NEMESES if not n.misfit(system) and any(words in n.kind for words in plan.only)
    ]
    kills = [n for n in fitting if n.is_kill] or fitting
    of_kills = set(chance.sample(range(plan.faults), plan.kills))
    faults: list[Fault] = []
    times: Counter[str] = Counter()
    busy: dict[Victim, Future[Fault]] = {}

    def struck(nemesis: Nemesis, own: random.Random) -> Fault:
        fault = nemesis.fault(system, own)
        faults.append(fault)
        say(f"{len(faults):4} {fault.kind}: {fault.target} ({count():,} tasks so far)")
        return fault

    began = time.monotonic()
    with ThreadPoolExecutor(4, "nemesis") as pool:
        try:
            for number in range(plan.faults):
                at = began + plan.every * (number + chance.random())
                time.sleep(max(at - time.monotonic(), 0))
                if time.monotonic() > began + plan.most_seconds:
                    break
                some = kills if number in of_kills else fitting
                while not (
                    free := [n for n in some if n.victim not in busy or busy[n.victim].done()]
                ):
                    time.sleep(0.05)
                if number in of_kills:  # short faults are available more often than long ones
                    free = [n for n in free if times[n.kind] == min(times[n.kind] for n in free)]
                nemesis = chance.choice(free)
                times[nemesis.kind] += 1
                if nemesis.victim in busy:
                    busy.pop(nemesis.victim).result()  # a nemesis that failed ends the run
                busy[nemesis.victim] = pool.submit(struck, nemesis, random.Random(chance.random()))
            for strike in busy.values():
                strike.result()
        except BaseException:
            system.is_over.set()
            raise
    return faults


def wait_for_quiet(system: SystemUnderTest, patience_s: float, at_least_s: float = 0) -> int:
    """Wait until all tasks are finished or progress stops, and return how many still wait."""
    least, waiting = None, 0
    until = time.monotonic() + max(patience_s, at_least_s)
    while time.monotonic() < until:
        try:
            waiting = system.waiting()
        except DelayTaskError:
            continue
        if not waiting:
            return 0
        if least is None or waiting < least:
            least, until = waiting, max(until, time.monotonic() + patience_s)
        time.sleep(0.5)
    return waiting


def find_hung(system: SystemUnderTest, patience_s: float) -> list[str]:
    """Return the pool processes that run no task although there is enough work for all.

    While the other processes work, a hung process is not noticed otherwise. Hung processes and
    their workers write their stacks to the log.
    """
    producer = ChaosProducer(system, 0, 0, 1)
    before = {pid: system.written(pid) for pids in system.pools() for pid in pids}
    idle: list[tuple[int, int]] = []
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        producer.burst(8 * len(before))
        time.sleep(2)
        idle = [
            (number, pid)
            for number, pids in enumerate(system.pools())
            for pid in pids
            if system.written(pid) == before.get(pid, 0)
        ]
        if not idle:
            break
    producer.stop()
    for number, pid in idle:
        for each in (pid, system.workers[number].pid):
            os.kill(each, STACKS)
    wait_for_quiet(system, patience_s)
    return [f"process {pid} of worker {number}" for number, pid in idle]


class Stalls:
    """Record when this process slept much longer than intended: other processes were delayed too,
    without an injected fault.
    """

    def __init__(self) -> None:
        self._found: list[Fault] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> list[Fault]:
        self._is_over.set()
        self._thread.join()
        return self._found

    def _watch(self) -> None:
        before_us = now_us()
        while not self._is_over.wait(0.1):
            at_us = now_us()
            if at_us - before_us > (0.1 + STALL_S) * 1e6:
                self._found.append(Fault(STALL, "all", before_us, at_us, "away", ALL))
            before_us = at_us
