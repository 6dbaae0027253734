"""Inject random faults into a real deployment, and check that no promise is broken.

Without options, this is the two-minute run that every change has to pass.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from chaos.checker import Checker, Verdict
from chaos.history import ALL, STALL, Fault, now_us
from chaos.load import PRODUCERS, CeleryProducer, Producer, RecurringLoad, schedules
from chaos.nemeses import NEMESES, Nemesis, Victim
from chaos.report import console, show
from chaos.system import ChaosSystem, Servers, Site, exit_on_signals
from delaytasks.model.errors import DelayTaskError
from tests.waiting import STACKS

#: A pause of the whole machine of this length is recorded as a fault that explains late tasks.
STALL_S = 0.5
#: In addition to the tasks of processors, one Celery task is called for this number of tasks.
ONE_CELERY_TASK_IN = 10
#: A call to the workers takes long while the broker is away.
CELERY_PRODUCERS = 2


def add_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--tasks", type=int, default=2000)
    add("--faults", type=int, default=30)
    add("--kills", type=int, default=22, help="minimum number of kills among the faults")
    add("--every", type=float, default=2.5, help="seconds between two faults")
    add("--seed", type=int, help="seed of the faults and of the scheduled tasks")
    add("--database", choices=["postgresql", "mariadb", "sqlite"], default="postgresql")
    add("--broker", choices=["redis", "rabbitmq"], default="redis")
    add("--timer", choices=["eta", "redis"], default="eta")
    add(
        "--patience",
        type=float,
        default=60.0,
        help="seconds without progress after which the run ends",
    )
    add(
        "--within",
        type=float,
        default=60.0,
        help="seconds after the last fault until every due task must be finished",
    )
    add(
        "--only",
        action="append",
        metavar="WORDS",
        help="use only faults whose names contain WORDS; `kill` selects all kills",
    )
    add("--keep", metavar="FOLDER", help="new folder that keeps the logs of all processes")


def main(options: Namespace) -> int:
    if options.seed is None:
        options.seed = secrets.randbelow(1_000_000)
    site = Site(options.database, options.broker, options.timer)
    output, began = console(), time.monotonic()
    output.print(
        f"seed {options.seed}: {options.tasks:,} tasks and {options.faults} faults "
        f"in {_seconds(options):,.0f} s, on {site}"
    )
    exit_on_signals()
    with _folder(options.keep) as folder:
        servers, system = Servers(folder, site), None
        try:
            system = ChaosSystem(folder, servers)
            verdict = Run(system, options, output.print).verdict()
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # the cleanup must not be interrupted
            if system is not None:
                system.close()
            servers.close()
    status = show(verdict, output)
    output.print(f"{time.monotonic() - began:.0f} s")
    return status


@contextmanager
def _folder(kept: str | None) -> Iterator[Path]:
    if kept is not None:
        Path(kept).mkdir(parents=True)
        yield Path(kept).absolute()
        return
    prefix = "delaytasks-chaos-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _seconds(options: Namespace) -> float:
    return float(max(options.faults, 1) * options.every)


class Run:
    """One run: tasks are scheduled, faults are injected, and the history is checked."""

    def __init__(
        self, system: ChaosSystem, options: Namespace, say: Callable[[str], object]
    ) -> None:
        self._system, self._options, self._say = system, options, say
        self._chance = random.Random(options.seed)
        self._seconds = _seconds(options)
        #: A busy machine gets at most twice the time.
        self._most_seconds = 2 * self._seconds + 60
        self._producers: list[Producer] = []

    def verdict(self) -> Verdict:
        options, system, seconds = self._options, self._system, self._seconds
        celery = list[Producer]()
        for kind, made, number, tasks in (
            (Producer, self._producers, PRODUCERS, options.tasks),
            (CeleryProducer, celery, CELERY_PRODUCERS, options.tasks // ONE_CELERY_TASK_IN),
        ):
            each = -(-tasks // number)
            made += [kind(system, options.seed + n, each, each / seconds) for n in range(number)]
        delays = system.deployment.producer(system.servers.database_url)
        recurring = RecurringLoad(delays, schedules(), system.pause)
        with stalls() as stalled:
            faults = self._strike()
            until = time.monotonic() + self._most_seconds - seconds
            for producer in self._producers:
                producer.wait(max(until - time.monotonic(), 0))
            for producer in (*self._producers, *celery):
                producer.stop()
            recurring.stop()
            delays.close()
            self._say(f"{self._count():,} tasks scheduled; the last fault is over")
            began = time.monotonic()
            last_us = max((fault.until_us for fault in faults), default=now_us())
            by_us = last_us + int(options.within * 1e6)
            # Waiting beyond the deadline distinguishes late tasks from stuck ones.
            left_s = max((by_us - now_us()) / 1e6, 0)
            left = self._wait_for_quiet(left_s + options.patience)
            self._say(f"{left} of them still wait {time.monotonic() - began:.1f} s later")
            hung = self._find_hung()
            quiet_us = now_us()
        history = system.history(recurring.schedules)
        history.hung = hung
        history.faults = sorted(faults + stalled, key=lambda fault: fault.from_us)
        return Checker(history, quiet_us=quiet_us, by_us=by_us).verdict()

    def _count(self) -> int:
        return sum(producer.count for producer in self._producers)

    def _strike(self) -> list[Fault]:
        """Inject the faults.

        Each component has at most one fault at a time; several components may have one.
        """
        chance, options = self._chance, self._options
        fitting = self._fitting()
        kills = [nemesis for nemesis in fitting if nemesis.is_kill] or fitting
        of_kills = set(chance.sample(range(options.faults), min(options.kills, options.faults)))
        faults = list[Fault]()
        times: Counter[str] = Counter()
        busy: dict[Victim, Future[None]] = {}

        def strike(nemesis: Nemesis, own: random.Random) -> None:
            fault = nemesis.fault(self._system, own)
            faults.append(fault)
            so_far = f"{self._count():,} tasks so far"
            self._say(f"{len(faults):4} {fault.kind}: {fault.target} ({so_far})")

        def free(some: list[Nemesis]) -> list[Nemesis]:
            return [n for n in some if n.victim not in busy or busy[n.victim].done()]

        began = time.monotonic()
        with ThreadPoolExecutor(4, "nemesis") as pool:
            try:
                for number in range(options.faults):
                    at = began + options.every * (number + chance.random())
                    time.sleep(max(at - time.monotonic(), 0))
                    if time.monotonic() > began + self._most_seconds:
                        break
                    some = kills if number in of_kills else fitting
                    while not free(some):
                        time.sleep(0.05)
                    some = free(some)
                    if number in of_kills:  # short faults are available more often than long ones
                        least = min(times[nemesis.kind] for nemesis in some)
                        some = [nemesis for nemesis in some if times[nemesis.kind] == least]
                    nemesis = chance.choice(some)
                    times[nemesis.kind] += 1
                    if nemesis.victim in busy:
                        busy.pop(nemesis.victim).result()  # a nemesis that failed ends the run
                    own = random.Random(chance.random())
                    busy[nemesis.victim] = pool.submit(strike, nemesis, own)
                for one in busy.values():
                    one.result()
            except BaseException:
                self._system.is_over.set()
                raise
        return faults

    def _fitting(self) -> list[Nemesis]:
        """Return the selected faults that the deployment allows."""
        words = self._options.only or [""]
        fitting = list[Nemesis]()
        for nemesis in NEMESES:
            if why := nemesis.misfit(self._system):
                self._say(f"skipped: {nemesis.kind}: {why}")
            elif any(word in nemesis.kind for word in words):
                fitting.append(nemesis)
        return fitting

    def _wait_for_quiet(self, at_least_s: float) -> int:
        """Wait until all tasks are finished or progress stops, and return how many still wait."""
        least, live, patience_s = None, 0, self._options.patience
        until = time.monotonic() + max(patience_s, at_least_s)
        while time.monotonic() < until:
            try:
                live = self._system.live()
            except DelayTaskError:
                continue
            if not live:
                return 0
            if least is None or live < least:
                least, until = live, max(until, time.monotonic() + patience_s)
            time.sleep(0.5)
        return live

    def _find_hung(self) -> list[str]:
        """Return the pool processes that run no task although there is enough work for all.

        While the other processes work, a hung process is not noticed otherwise. Hung processes and
        their workers write their stacks to the log.
        """
        system, patience_s = self._system, self._options.patience
        producer = Producer(system, 0, 0, 1)
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
        self._wait_for_quiet(patience_s)
        return [f"process {pid} of worker {number}" for number, pid in idle]


@contextmanager
def stalls() -> Iterator[list[Fault]]:
    """Record when this process slept much longer than intended: other processes were delayed too,
    without an injected fault.
    """
    found, is_over = list[Fault](), threading.Event()

    def watch() -> None:
        before_us = now_us()
        while not is_over.wait(0.1):
            at_us = now_us()
            if at_us - before_us > (0.1 + STALL_S) * 1e6:
                found.append(Fault(STALL, "all", before_us, at_us, "away", ALL))
            before_us = at_us

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
