"""Finds near rows in the table where no broker delivers them, woken by notifications.

A worker reads the rows shortly before they are due, and keeps them until then. If the database can
send notices about tasks that are due soon, the worker listens to them and reads the table once a
second. Otherwise, and while no notices arrive, it reads the table more often, and even more often
after it found a task too late.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from delaytasks.broker.direct import LOOK, NOTICE_SLACK_S, NOTIFIED_POLL_S, DirectTimer, read_notice
from delaytasks.loops import Loop
from delaytasks.model.clock import from_us, monotonic
from delaytasks.model.inputs import ALL_QUEUES
from delaytasks.model.task import Entry
from delaytasks.model.workers import POLLING_PREFIX
from delaytasks.settings import SILENT_SWEEPS
from delaytasks.worker.processes import serves
from delaytasks.worker.sweep import MOST_OTHERS, OverdueQueues

if TYPE_CHECKING:
    from delaytasks.db.statements import Listener
    from delaytasks.runtime import Runtime
    from delaytasks.worker.worker_runtime import WorkerRuntime


# -- Receives the notices of the database about tasks that are due soon ---------------------------

# A connection pooler may accept LISTEN and pass nothing on, and a broken connection may stay open
# for minutes. So the listener sends a notice to itself from time to time, in the same way as
# producers. The notices count as complete as long as these test notices arrive.


#: How long one turn waits for a notice.
NOTICE_WAIT_S = 1.0
#: The time between two test notices, and how long a test notice may take to arrive.
TEST_EVERY_S, TEST_ANSWER_S = 30.0, 2.0
#: How long the listener rests after a failure.
RECONNECT_REST_S = 5.0
#: A turn that takes longer is stuck.
LISTEN_STUCK_S = 10.0
_TEST_PREFIX = "check "


class NotifyListener:
    """`on_entries` gets the entries of a notice, and `on_wake` is called to read the table now."""

    def __init__(
        self,
        runtime: Runtime,
        on_entries: Callable[[Sequence[Entry]], object],
        on_wake: Callable[[], None],
    ) -> None:
        self._notices = runtime.store.notices
        self._events = events = runtime.events
        self._on_entries = on_entries
        self._on_wake = on_wake
        self._listener: Listener | None = None
        self._test_notice = _TEST_PREFIX + secrets.token_hex(4)
        self._test_arrived_at = self._test_sent_at = float("-inf")
        self._is_failure_reported = False
        #: Whether all notices arrive.
        self.is_listening = False
        self.loop = Loop("notify_listener", self._turn, events, LISTEN_STUCK_S, self._disconnect)

    def stop(self) -> None:
        self.loop.stop(0)

    def _turn(self) -> float | None:
        if not self._notices.is_possible:
            return None
        try:
            if self._listener is None:
                self._listener = self._notices.listen()
                self._test_arrived_at = self._test_sent_at = float("-inf")
                if self._listener is None:
                    return None  # this driver has no notices
            self._test_connection()
            for payload in self._listener.wait(NOTICE_WAIT_S):
                self._receive(payload)
            if not self.loop.is_running:
                self._disconnect()
            return 0
        except Exception as error:  # each driver has errors of its own
            self._report_failure(error)
            self._disconnect()
            return RECONNECT_REST_S

    def _test_connection(self) -> None:
        now = monotonic()
        if self._test_sent_at > self._test_arrived_at:
            if now - self._test_sent_at > TEST_ANSWER_S:
                raise TimeoutError(
                    "notices do not arrive: is there a connection pooler in between?"
                )
        elif now - self._test_arrived_at > TEST_EVERY_S:
            self._test_sent_at = now
            self._notices.send([self._test_notice])

    def _receive(self, payload: str) -> None:
        if payload == self._test_notice:
            self._test_arrived_at = monotonic()
            if not self.is_listening:
                self._report_success()
        elif payload == LOOK:
            self._on_wake()
        elif not payload.startswith(_TEST_PREFIX):  # else it is another worker's test
            try:
                entries = read_notice(payload)
            except (ValueError, TypeError, RecursionError) as error:
                self._events.refuse("notice", error)  # any client of the database can send notices
            else:
                self._on_entries(entries)

    def _report_success(self) -> None:
        self.is_listening, self._is_failure_reported = True, False
        self._events.emit("notices.up")
        self._on_wake()

    def _report_failure(self, error: Exception) -> None:
        self.is_listening = False
        if not self._is_failure_reported:
            text = f"{type(error).__name__}: {error}"
            self._events.emit("notices.down", error=text, cause=error)
        self._is_failure_reported = True
        self._on_wake()

    def _disconnect(self) -> None:
        listener, self._listener, self.is_listening = self._listener, None, False
        if listener is not None:
            self._events.attempt(self.loop.name, "disconnect", listener.close)


# -- Which entries are this worker's -------------------------------------------------------------


_PRIME = 1_000_003


class WorkerShares:
    """The shares as one worker knows them. The share of each worker is as large as its pool."""

    def __init__(self, hostname: str) -> None:
        self._hostname = hostname
        self._workers: Sequence[tuple[str, int, Sequence[str]]] = ()
        #: The number of parts of each queue, and which of them are this worker's.
        self._parts: dict[str, tuple[int, range]] = {}

    def learn(self, workers: Sequence[Mapping[str, Any]], now: datetime, sweep_s: float) -> None:
        """Read the rows of the table of workers."""
        known = [
            (worker["name"], max(worker["concurrency"], 1), worker["queues"])
            for worker in workers
            if worker["pool"].startswith(POLLING_PREFIX)
            and abs((now - worker["seen_at"]).total_seconds()) < SILENT_SWEEPS * sweep_s
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


# -- Reads the table -------------------------------------------------------------------------------


#: The rest between two reads of a table without notices. It grows from the first to the second
#: bound, by this factor, while no task is found late.
MIN_POLL_REST_S, MAX_POLL_REST_S = 0.02, 0.5
REST_GROWTH = 1.5
#: Rows in one read. If there are more, the next read comes soon.
MAX_READ_ROWS = 2000
#: How often the poller looks for overdue tasks, and for other workers.
OVERDUE_CHECK_S = 1.0
#: A turn that takes longer is stuck. A read may wait for a slow database.
POLL_STUCK_S = 10.0


class TablePoller:
    """Also gets the entries that this process arms itself, with `timer`."""

    def __init__(self, worker: WorkerRuntime, timer: DirectTimer) -> None:
        self._runtime = runtime = worker.runtime
        self._store = runtime.store
        self._settings = runtime.settings
        self._timer = timer
        self._processes = worker.processes
        self._dispatcher = worker.dispatcher
        self._shares = WorkerShares(worker.celery_worker.hostname)
        #: The rows that were passed on, which the next read may find again, and their due times.
        self._passed_on: dict[tuple[int, int], int] = {}
        self._rest_s = MIN_POLL_REST_S
        self._overdue_check_at = 0.0
        self.loop = Loop(
            "table_poller", self._turn, runtime.events, POLL_STUCK_S, self._store.close
        )
        sweeps, grace_s = self._store.sweeps, self._settings.grace_s
        self._overdue = OverdueQueues(sweeps, grace_s, self.loop.report_progress)
        self.listener = NotifyListener(runtime, self.take, self.wake)
        self.loops = [self.loop, self.listener.loop]
        timer.subscribe(self.take)

    def stop(self) -> None:
        self._timer.unsubscribe(self.take)
        self.listener.stop()
        self.loop.stop()

    def wake_others(self) -> None:
        """Make the other workers read what was this worker's, once its row has been deleted."""
        self._timer.request_poll()

    def wake(self) -> None:
        """Read the table now, as well as the list of workers."""
        self._overdue_check_at = 0.0
        self.loop.wake()

    def take(self, entries: Iterable[Entry]) -> Sequence[Entry]:
        """Keep those near entries that are this worker's and were not passed on before.

        Return them. Any thread may call this.
        """
        mine = [
            entry
            for entry in entries
            if (entry.id, entry.version) not in self._passed_on
            and serves(self._processes.queues, entry.queue)
            and self._shares.is_mine(entry)
        ]
        self._passed_on.update(((entry.id, entry.version), entry.due_us) for entry in mine)
        if mine:
            self._dispatcher.receive(mine)
        return mine

    # -- reading ----------------------------------------------------------------------------------

    def _turn(self) -> float:
        store = self._store
        checks_overdue = monotonic() >= self._overdue_check_at
        if checks_overdue:
            self._overdue_check_at = monotonic() + OVERDUE_CHECK_S
            now = self._runtime.clock.now()
            self._shares.learn(store.workers.all(), now, self._settings.sweep_s)
        now_us, grace_us = self._runtime.clock.now_us(), self._settings.grace_s * 1e6
        until_us = now_us + (self._normal_rest_s() + NOTICE_SLACK_S) * 1e6
        found = store.sweeps.first_due_between(
            from_us(int(now_us - grace_us)),
            from_us(int(until_us)),
            MAX_READ_ROWS,
            self._runtime.policy_cache.known,
        )
        mine = self.take(found)
        if checks_overdue:
            self._start_overdue_drains()
        passed_on = list(self._passed_on.items())
        self._passed_on = {name: due for name, due in passed_on if due > now_us - 2 * grace_us}
        self._adapt_rest(any(entry.due_us <= now_us for entry in mine))
        rest_s = self._normal_rest_s()
        if len(found) == MAX_READ_ROWS:
            # There are more rows, which are due later than these. Read them before they are due.
            rest_s = min(rest_s, (found[-1].due_us - now_us) / 2e6)
        return max(rest_s, MIN_POLL_REST_S)

    def _normal_rest_s(self) -> float:
        return NOTIFIED_POLL_S if self.listener.is_listening else self._rest_s

    def _adapt_rest(self, was_late: bool) -> None:
        self._rest_s = (
            MIN_POLL_REST_S if was_late else min(self._rest_s * REST_GROWTH, MAX_POLL_REST_S)
        )

    def _start_overdue_drains(self) -> None:
        """Start drains of what no worker took in time, whichever worker's it was."""
        queues = set(self._processes.queues)
        serves_all = ALL_QUEUES in queues
        if serves_all:
            queues = self._runtime.queues.all()
        late = self._overdue.of_named(queues)
        if serves_all:
            # No more unknown queues than can have their turn soon, in between the known ones.
            most = MOST_OTHERS - self._dispatcher.drain_count
            late |= self._overdue.of_others(queues, most)
        for queue, priorities in late.items():
            self._dispatcher.start_drain(queue, priorities)
