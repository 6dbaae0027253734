"""Asks workers to drain the queues that have overdue rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from delaytasks.core.events import Events
from delaytasks.core.filters import batches
from delaytasks.core.inputs import ALL_QUEUES
from delaytasks.core.interfaces import QueuePlace, Timer
from delaytasks.core.settings import Settings
from delaytasks.core.text import first_names
from delaytasks.core.why import one_more_worker

if TYPE_CHECKING:
    from delaytasks.storage.sweep_queries import SweepQueries
    from delaytasks.storage.worker_table import WorkerTable


#: Most drain messages for one queue in one sweep, for any number of workers.
MOST_MESSAGES_PER_QUEUE = 500
#: The pool names of workers without a broker begin with one of these prefixes: those that poll the
#: table for rows due within the horizon, and those that only drain (`delaytasks drain`).
POLLING_PREFIX, ONLY_DRAINING_PREFIX = "direct/", "drain/"
#: Starts a drain in this worker; returns False if the worker does not serve the queue.
StartDrain = Callable[[str, Sequence[int]], bool]


class DrainRequests:
    """Finds the overdue queues of one database. Sends drain messages, or starts drains here."""

    def __init__(
        self,
        settings: Settings,
        sweeps: SweepQueries,
        workers: WorkerTable,
        timer: Timer,
        events: Events,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self._timer = timer
        self._events = events
        self._overdue = OverdueQueues(sweeps, settings.grace_s)

    def request_all(
        self, paused: Collection[str], on_step: OnStep, start_drain: StartDrain
    ) -> None:
        """Send drain messages, upon which workers claim overdue rows by themselves.

        The queues that live workers name come first. Each sweep looks at a part of the others.
        """
        serving = self._workers_by_queue()
        named = serving.keys() - {ALL_QUEUES}
        late = _without(paused, self._overdue.of_named(named, on_step))
        self._send(late, serving, on_step, start_drain)
        others = _without(paused, self._overdue.of_others(named, on_step))
        if serving[ALL_QUEUES]:
            self._send(others, serving, on_step, start_drain)
        elif others:  # no worker would receive the messages, and they would accumulate
            self._events.emit(
                "queue.unserved",
                count=len(others),
                queue=first_names(others),
                remedy=one_more_worker(others, self._settings.namespace),
            )

    def start_own(
        self, queues: Sequence[str], paused: Collection[str], start_drain: StartDrain
    ) -> None:
        """Start drains in this worker, for those of its queues that have overdue rows."""
        for queue, priorities in _without(paused, self._overdue.of_named(queues)).items():
            start_drain(queue, priorities)

    def _workers_by_queue(self) -> Counter[str]:
        """Return the number of live workers that receive drain messages, for each queue."""
        without_broker = POLLING_PREFIX, ONLY_DRAINING_PREFIX
        return Counter(
            queue
            for worker in self._workers.all()
            if not self._settings.uses_broker or not worker["pool"].startswith(without_broker)
            for queue in worker["queues"]
        )

    def _send(
        self,
        late: OverdueLevels,
        serving: Counter[str],
        on_step: OnStep,
        start_drain: StartDrain,
    ) -> None:
        for queue, priorities in late.items():
            workers = serving[queue] + serving[ALL_QUEUES]
            messages = min(self._settings.drain_messages * workers, MOST_MESSAGES_PER_QUEUE)
            if self._timer.request_drain(queue, priorities, messages, self._settings.sweep_s):
                self._events.emit("sweep.drain", queue=queue, messages=messages)
            elif start_drain(queue, priorities):  # the broker takes no messages
                self._events.emit("sweep.local_drain", queue=queue)
            on_step()


def _without(paused: Collection[str], late: OverdueLevels) -> OverdueLevels:
    return {queue: priorities for queue, priorities in late.items() if queue not in paused}


#: Queues of live workers, and other queues, that one call checks. The next call continues after
#: them.
MOST_NAMED, MOST_OTHERS = 1000, 100
#: Queues in one query.
QUEUES_PER_QUERY = 50

#: Called after each step of a sweep, so that the caller can show that the sweep makes progress.
OnStep = Callable[[], None]
#: The priorities that have overdue tasks, by queue. A queue with only a waitlist has priority 0.
OverdueLevels = dict[str, list[int]]


class OverdueQueues:
    """Looks for overdue tasks in a bounded number of queues at a time, in turn."""

    def __init__(self, sweeps: SweepQueries, late_s: float) -> None:
        self._sweeps = sweeps
        self._late_s = late_s
        self._named_after = ""
        self._place = QueuePlace()

    def of(self, queues: Iterable[str], on_step: OnStep = lambda: None) -> OverdueLevels:
        """Return the overdue levels of these queues."""
        late: OverdueLevels = {}
        for some in batches(queues, QUEUES_PER_QUERY):
            for level in self._sweeps.levels_of(some, self._late_s):
                late.setdefault(level.queue, []).append(level.priority)
            on_step()
        return late

    def of_named(self, queues: Collection[str], on_step: OnStep = lambda: None) -> OverdueLevels:
        """Return the overdue levels of the queues that workers name, of at most `MOST_NAMED`."""
        names: Sequence[str] = sorted(queues)
        if len(names) > MOST_NAMED:
            next_names = [name for name in names if name > self._named_after]
            names = [*next_names, *names][:MOST_NAMED]
            self._named_after = names[-1]
        return self.of(names, on_step)

    def of_others(
        self,
        named: Collection[str],
        on_step: OnStep = lambda: None,
        most: int = MOST_OTHERS,
    ) -> OverdueLevels:
        """Return the overdue levels of the next `most` queues of the table, except those named."""
        if most <= 0:
            return {}
        queues, self._place = self._sweeps.next_queues(self._place, most)
        on_step()
        return self.of(sorted(queues.difference(named)), on_step)
