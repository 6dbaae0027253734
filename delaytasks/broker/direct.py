"""The timer `direct`: tasks wait only in the table, and each worker looks for its own there.

`TablePoller` reads the rows shortly before they are due, and its worker keeps them until then. If
the database can send notices, a producer sends one when it writes a row that is due before the next
read, and the table is read at a notice, and once a second. Otherwise, and while `NotifyListener`
has no connection, it is read more often, and even more often after a task was found too late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from delaytasks.loops import Availability, Loop
from delaytasks.model.clock import Clock, from_us, monotonic
from delaytasks.model.errors import StoreError
from delaytasks.model.inputs import POLLING_PREFIX, serves
from delaytasks.model.task import CallerConnection, Entry

if TYPE_CHECKING:
    from delaytasks.db.statements import Listener, Notices
    from delaytasks.runtime import Runtime
    from delaytasks.worker.worker_runtime import WorkerRuntime

#: Workers that receive notices read the table this often.
NOTIFIED_POLL_S = 1.0
#: Rows that are due within `NOTIFIED_POLL_S + NOTICE_SLACK_S` are notified.
NOTICE_SLACK_S = 1.0


class DirectTimer:
    """Notifies the workers about rows that are due before their next read."""

    def __init__(self, notices: Notices, clock: Clock) -> None:
        self._notices = notices
        self._clock = clock

    @property
    def is_up(self) -> bool:
        """Always True: this timer needs only the database."""
        return True

    def arm(self, entries: Iterable[Entry]) -> bool:
        try:
            self.notify(entries)
        except StoreError:
            pass  # workers find the rows at their next read
        return True

    def notify(self, entries: Iterable[Entry], on: CallerConnection | None = None) -> None:
        """Notify workers when the transaction `on` commits, or immediately without one."""
        if self._notices.is_possible:
            until = self._clock.now_us() + (NOTIFIED_POLL_S + NOTICE_SLACK_S) * 1e6
            if any(entry.due_us <= until for entry in entries):
                self._notices.send(on)

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        """Do nothing: each worker looks for overdue rows once a second."""
        return True


# -- receiving notices ----------------------------------------------------------------------------

#: How long one turn waits for a notice.
NOTICE_WAIT_S = 1.0
#: How long the listener rests after a notice. The table is read once for all notices meanwhile.
NOTICE_REST_S = 0.005
#: How long the listener rests after a failure.
RECONNECT_REST_S = 5.0


class NotifyListener:
    """Calls `on_notice` when there is something new to read in the table."""

    def __init__(self, runtime: Runtime, on_notice: Callable[[], None]) -> None:
        self._notices = runtime.store.notices
        self._events = events = runtime.events
        self._on_notice = on_notice
        self._listener: Listener | None = None
        self._connection = Availability(
            lambda error: events.emit("notices.down", error=error),
            lambda: events.emit("notices.up"),
        )
        #: Whether notices arrive.
        self.is_listening = False
        self.loop = Loop("notify_listener", self._turn, events)

    def _turn(self) -> float | None:
        try:
            if self._listener is None:
                self._listener = self._notices.listen()
                if self._listener is None:
                    return None  # this database has no notices
                self.is_listening = True
                self._connection.answered()
                self._on_notice()  # nothing was heard until now
            if self._listener.wait(NOTICE_WAIT_S):
                self._on_notice()
                time.sleep(NOTICE_REST_S)
            if not self.loop.is_running:
                self._disconnect()
            return 0
        except Exception as error:  # each driver has errors of its own
            self._disconnect()
            self._connection.failed(f"{type(error).__name__}: {error}")
            self._on_notice()
            return RECONNECT_REST_S

    def _disconnect(self) -> None:
        listener, self._listener, self.is_listening = self._listener, None, False
        if listener is not None:
            self._events.attempt(self.loop.name, "disconnect", listener.close)


# -- which entries are this worker's --------------------------------------------------------------


_PRIME = 1_000_003


class WorkerShares:
    """The shares as one worker knows them. The share of each worker is as large as its pool."""

    def __init__(self, hostname: str) -> None:
        self._hostname = hostname
        self._workers: Sequence[tuple[str, int, Sequence[str]]] = ()
        #: The number of parts of each queue, and which of them are this worker's.
        self._parts: dict[str, tuple[int, range]] = {}

    def learn(
        self, workers: Sequence[Mapping[str, Any]], now: datetime, late_s: float, silent_s: float
    ) -> None:
        """Read the rows of the table of workers. One whose last report is older has no share.

        If this worker could not report in time, all reports may be late, and it waits for longer.
        """
        age_s = {each["name"]: abs((now - each["seen_at"]).total_seconds()) for each in workers}
        limit_s = late_s if age_s.get(self._hostname, 0.0) < late_s else silent_s
        known = [
            (worker["name"], max(worker["concurrency"], 1), worker["queues"])
            for worker in workers
            if worker["pool"].startswith(POLLING_PREFIX) and age_s[worker["name"]] < limit_s
        ]
        if known != self._workers:
            self._workers, self._parts = known, {}

    def is_mine(self, entry: Entry) -> bool:
        parts = self._parts.get(entry.queue)
        if parts is None:
            parts = self._parts[entry.queue] = self._parts_of(entry.queue)
        total, mine = parts
        return not mine or entry.id % _PRIME % total in mine

    def _parts_of(self, queue: str) -> tuple[int, range]:
        """Return an empty range as long as this worker has no row, so that it takes every task."""
        total, mine = 0, range(0)
        for hostname, size, queues in self._workers:
            if serves(queues, queue):
                if hostname == self._hostname:
                    mine = range(total, total + size)
                total += size
        return total, mine


# -- reading the table ----------------------------------------------------------------------------


#: The rest between two reads of a table without notices. It grows from the first to the second
#: bound, by this factor, while no task is found late.
MIN_POLL_REST_S, MAX_POLL_REST_S = 0.02, 0.5
REST_GROWTH = 1.5
#: Rows in one read. If there are more, the next read comes soon.
MAX_READ_ROWS = 2000
#: How often the poller looks for other workers, and for overdue tasks.
CHECK_S = 1.0
#: Tasks of other workers that are late by this time are drained here too, at most once in this
#: time. Their workers are dead, suspended or busy, or have not read them yet.
LATE_OF_OTHERS_S = 0.25
#: How long a read waits for an answer. If the database is silent, another connection may not be.
POLL_ANSWER_S = 10.0


class TablePoller:
    """Passes on the rows of this worker that are due before the next read. Drains the overdue rows
    of all workers, and those of other workers when they are `LATE_OF_OTHERS_S` late.
    """

    def __init__(self, worker: WorkerRuntime) -> None:
        self._worker = worker
        self._runtime = runtime = worker.runtime
        self._shares = WorkerShares(worker.celery_worker.hostname)
        self._check_at = self._help_at = 0.0
        #: The rows that were passed on, which the next read may find again, and their due times.
        self._passed_on: dict[tuple[int, int], int] = {}
        self._rest_s = MIN_POLL_REST_S
        self.loop = Loop("table_poller", self._turn, runtime.events, answer_s=POLL_ANSWER_S)
        self.listener = NotifyListener(runtime, self.loop.wake)
        self.loops = [self.loop, self.listener.loop]

    def stop(self) -> None:
        self.listener.loop.stop(0)
        self.loop.stop()

    def _turn(self) -> float:
        store, settings, clock = self._runtime.store, self._runtime.settings, self._runtime.clock
        is_time_to_check = monotonic() >= self._check_at
        if is_time_to_check:
            self._check_at = monotonic() + CHECK_S
            # A worker reports within each sweep interval. If its report is only late, two workers
            # claim some tasks meanwhile, and one of them finds nothing.
            late_s = settings.sweep_s + CHECK_S
            self._shares.learn(store.workers.all(), clock.now(), late_s, settings.silent_s)
        now_us, grace_us = clock.now_us(), settings.grace_s * 1e6
        hears_notices = self.listener.is_listening
        rest_s = NOTIFIED_POLL_S if hears_notices else self._rest_s
        until_us = now_us + (rest_s + NOTICE_SLACK_S) * 1e6
        found = store.sweeps.first_due_between(
            from_us(int(now_us - grace_us)), from_us(int(until_us)), MAX_READ_ROWS
        )
        mine = self._new(found)
        if mine:
            self._worker.dispatcher.receive(mine)
        self._drain_late_of_others(found, now_us)
        if is_time_to_check:
            self._worker.sweep_loop.drain_own_queues()
        self._passed_on = {
            name: due_us
            for name, due_us in self._passed_on.items()
            if due_us > now_us - 2 * grace_us
        }
        was_late = any(entry.due_us <= now_us for entry in mine)
        longer_s = min(self._rest_s * REST_GROWTH, MAX_POLL_REST_S)
        self._rest_s = MIN_POLL_REST_S if was_late else longer_s
        rest_s = NOTIFIED_POLL_S if hears_notices else self._rest_s
        if len(found) == MAX_READ_ROWS:
            # There are more rows, which are due later than these. Read them before they are due.
            rest_s = min(rest_s, (found[-1].due_us - now_us) / 2e6)
        return max(rest_s, MIN_POLL_REST_S)

    def _drain_late_of_others(self, found: Iterable[Entry], now_us: int) -> None:
        if monotonic() < self._help_at or not self._worker.dispatcher.capacity():
            return
        late: dict[str, set[int]] = {}
        for entry in found:
            is_late = entry.due_us < now_us - LATE_OF_OTHERS_S * 1e6
            if is_late and not self._shares.is_mine(entry):  # so this worker serves its queue
                late.setdefault(entry.queue, set()).add(entry.priority)
        for queue, priorities in late.items():
            self._help_at = monotonic() + LATE_OF_OTHERS_S
            self._worker.dispatcher.start_drain(queue, priorities)

    def _new(self, found: Iterable[Entry]) -> list[Entry]:
        """Return those entries that are this worker's, and that were not passed on before."""
        queues, known = self._worker.processes.queues, self._passed_on
        new = {
            (entry.id, entry.version): entry
            for entry in found
            if (entry.id, entry.version) not in known
            and serves(queues, entry.queue)
            and self._shares.is_mine(entry)
        }
        known.update((name, entry.due_us) for name, entry in new.items())
        return list(new.values())
