"""Arms near rows by messages with an eta, which a thread of the process sends.

`Publisher` sends Celery tasks of ours to our queues. `EtaTimer` arms rows by them, and `Sender` is
the thread that waits for a timer.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing.process
import multiprocessing.util
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from math import inf
from typing import Any, NamedTuple

from kombu.entity import Exchange, Queue
from kombu.utils.uuid import uuid

from delaytasks.broker.link import BrokerLink, OutageError, Outgoing, QueueAwayError
from delaytasks.events import Events
from delaytasks.loops import Availability
from delaytasks.model.clock import Clock, fork_safe, from_us, monotonic
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.filters import batches
from delaytasks.model.inputs import MAX_PRIORITY, check_id, is_queue
from delaytasks.model.task import Entry, Timer, by_queue
from delaytasks.model.text import count

RUN = "delaytasks.run"
#: The Celery task that sweeps; beat sends it.
SWEEP = "delaytasks.sweep"
#: The entries in one message, which costs as much as a message with one entry.
ENTRIES_PER_MESSAGE = 100
#: The beginning of the year 10000, which no `datetime` can represent.
MAX_DUE_US = 253_402_300_800_000_000


# -- Publishes Celery tasks of ours, and lets the broker or a queue rest that fails ---------------


#: Nothing is sent to a queue for this time after the broker has refused it.
REFUSED_QUEUE_REST_S = 5.0


class Publisher:
    """Keeps nothing for an unavailable broker: the sweep finds the rows."""

    def __init__(self, app: Any, namespace: str, limit_s: float, events: Events) -> None:
        self._app = app
        self.namespace = namespace
        self._events = events
        self._link = BrokerLink(app, limit_s)
        self._broker = Availability(
            lambda error: events.emit("timer.down", error=error), lambda: events.emit("timer.up")
        )
        self._targets: dict[str, Queue] = {}
        #: The time until which nothing is sent to a refused queue, by queue.
        self._refused: dict[str, float] = {}

    @property
    def is_up(self) -> bool:
        return self._broker.is_up

    def queue(self, name: str) -> Queue:
        """Return the broker's queue for a logical queue."""
        full = f"{self.namespace}.{name}"
        kind = self._app.conf.get("task_default_queue_type", "classic")
        arguments = None if kind == "classic" else {"x-queue-type": kind}
        return Queue(
            full, Exchange(full, type="direct"), routing_key=full, queue_arguments=arguments
        )

    def connect(self) -> None:
        """Find out whether the broker is available."""
        if not self._broker.is_resting:
            try:
                self._link.publish([])
            except OutageError as error:
                self._broker.failed(str(error))
            else:
                self._broker.answered()

    def send(self, queue: str, messages: Sequence[tuple[list[Any], Mapping[str, Any]]]) -> bool:
        """Send one message of the Celery task `RUN`, or of the option `task`, per (args, options).

        Return False if the broker is unavailable, or refuses the queue. The sweep then finds the
        rows.
        """
        if self._broker.is_resting or monotonic() < self._refused.get(queue, 0):
            return False
        target = self._targets.get(queue) or self._targets.setdefault(queue, self.queue(queue))
        results = self._link.publish(
            [self._message(target, args, options) for args, options in messages]
        )
        error = next((result for result in results if result is not None), None)
        if isinstance(error, OutageError) and not isinstance(error, QueueAwayError):
            self._broker.failed(str(error))
        else:
            self._broker.answered()
            if error is not None:
                self._report_refused(queue, f"{type(error).__name__}: {error}")
            else:
                self._refused.pop(queue, None)
        return error is None

    def rest(self, queue: str, seconds: float) -> None:
        """Send nothing to `queue` for `seconds`: a worker found that it cannot read the queue."""
        self._refused[queue] = monotonic() + seconds

    def close(self) -> None:
        self._link.close()

    def _message(self, target: Queue, args: list[Any], options: Mapping[str, Any]) -> Outgoing:
        message = self._app.amqp.as_task_v2(
            uuid(),
            options.get("task", RUN),
            args=args,
            eta=options.get("eta"),
            expires=options.get("expires"),
            argsrepr=options.get("repr", ""),
        )
        return Outgoing(
            message.body,
            {
                # The default exchange needs no bindings, and the queue exists, since it was
                # declared.
                "exchange": "",
                "routing_key": target.name,
                "serializer": "json",
                "headers": {**message.headers, "ignore_result": True},
                "delivery_mode": 1,
                **message.properties,
            },
            target,
        )

    def _report_refused(self, queue: str, error: str) -> None:
        is_new = queue not in self._refused
        self.rest(queue, REFUSED_QUEUE_REST_S)
        if is_new:
            self._events.emit("queue.refused", queue=queue, error=error)


# -- The timer `eta` ------------------------------------------------------------------------------


class EtaTimer:
    """Sends messages of the form `delaytasks.run([[id, version, due, priority], …])`.

    The eta of a message is the first due time. The worker acknowledges the message when it receives
    it, and keeps each entry until its own due time, so that no entry is early.
    """

    def __init__(self, publisher: Publisher, clock: Clock) -> None:
        self._publisher = publisher
        self._clock = clock

    @property
    def is_up(self) -> bool:
        return self._publisher.is_up

    def arm(self, entries: Iterable[Entry]) -> bool:
        """Send the messages. Without entries, only find out whether the broker is available."""
        if not entries:
            self._publisher.connect()
        sent = [
            self._publisher.send(queue, list(_messages(some)))
            for queue, some in by_queue(entries).items()
        ]
        return all(sent)

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        """Send drain messages. A worker that receives one starts a drain of `queue`."""
        if not is_queue(queue):
            return False
        expires = self._clock.now() + timedelta(seconds=expires_s)
        wanted = {"drain": list(priorities)}
        message: tuple[list[Any], dict[str, Any]] = ([[], wanted], {"expires": expires})
        return self._publisher.send(queue, [message] * messages)


def _messages(entries: list[Entry]) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    entries.sort(key=lambda entry: entry.due_us)
    for some in batches(entries, ENTRIES_PER_MESSAGE):
        options = {"eta": from_us(some[0].due_us), "repr": f"({count(len(some), 'task')})"}
        yield [[entry.as_list() for entry in some]], options


class TimerMessage(NamedTuple):
    """Entries, or a drain message: the priorities of the overdue tasks to claim."""

    entries: list[Entry]
    priorities: list[int] | None = None


def read_message(args: Any, queue: str) -> TimerMessage:
    """Return what a message asks for, or raise `ValueError` if it is malformed.

    Any client of the broker can send messages, so each claim checks the row again.
    """
    if (
        not isinstance(args, (list, tuple))
        or not 1 <= len(args) <= 2
        or not isinstance(args[0], list)
    ):
        raise ValueError("not a list of entries")
    if len(args[0]) > 10 * ENTRIES_PER_MESSAGE:
        raise ValueError("too many entries")
    entries = []
    for item in args[0]:
        if (
            not isinstance(item, list)
            or len(item) != 4
            or not all(type(number) is int for number in item)
        ):
            raise ValueError("an entry is [id, version, due, priority]")
        try:
            id = check_id(item[0])
        except InvalidInputError as error:
            raise ValueError(str(error)) from None
        if not (0 <= item[1] < 2**63 and 0 <= item[2] < MAX_DUE_US and _is_priority(item[3])):
            raise ValueError("version, due or priority is out of range")
        entries.append(Entry(id, item[1], item[2], queue, item[3]))
    if len(args) == 1:
        return TimerMessage(entries)
    options = args[1] if isinstance(args[1], dict) else {}
    priorities = options.get("drain")
    if (
        not isinstance(priorities, list)
        or len(priorities) > MAX_PRIORITY + 1
        or not all(map(_is_priority, priorities))
    ):
        raise ValueError("a drain message has priorities")
    return TimerMessage(entries, priorities)


def _is_priority(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_PRIORITY


# -- The sender: a thread of each process that arms, which makes the calls of producers shorter ----


logger = logging.getLogger("delaytasks")
#: A call with more entries waits until they are armed: for each of them the round trip hardly
#: counts, and a producer of many tasks must not be faster than the broker.
MAX_GATHERED_ENTRIES = 100
#: The number of entries that wait for the thread. Further entries are not armed: the sweep finds
#: their rows.
MAX_WAITING_ENTRIES = 100_000
#: Entries wait for others this long, and not longer than this part of the time until the first one
#: is due.
ARM_DELAY_S, ARM_DELAY_PART = 0.1, 0.1
#: The thread begins to send what was gathered no more often than this. In a loop of calls whose
#: tasks are due immediately, it would otherwise send a message for each call, which takes longer
#: than the call.
SEND_INTERVAL_S = 0.002
#: A call waits for the time limit per queue, and each entry extends this time by this part of it.
LIMIT_PART_PER_ENTRY = 0.1 / ENTRIES_PER_MESSAGE
#: Seconds for which an ending process waits for the broker. Without this wait, the first message of
#: a short-lived process would be lost if the broker answers slowly.
EXIT_S = 5.0


class _Batch:
    """What the sender does next. It is one for all calls that come meanwhile."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        #: The arguments of `request_drain`.
        self.drains: list[tuple[Any, ...]] = []
        self.send_at = inf
        self.is_over = threading.Event()
        self.is_armed = False


class Sender:
    """The one thread that waits for the timer. It arms together the entries of several calls.

    A call waits up to its time limit. The thread still arms what was given by a call that no longer
    waits, since its rows are committed. A call does the work itself if no thread can be started,
    and while the interpreter ends.
    """

    def __init__(self, timer: Timer, clock: Clock, limit_s: float) -> None:
        self._timer = timer
        self._clock = clock
        self._limit_s = limit_s
        fork_safe(self)

    def after_fork(self) -> None:
        """Forget the entries of the parent process, whose thread arms them."""
        vars(self).pop("_condition", None)
        self._next: _Batch | None = None
        self._sent_at = -inf
        self._is_sending = False
        #: Whether a call reached its time limit: none waits until the thread has done its work.
        self._is_late = False
        #: Whether the last work raised an error, so that it is unknown which entries are armed.
        self._has_failed = False
        #: The thread that sends. A thread ends when it is no longer this one.
        self._thread: threading.Thread | None = None
        self._is_exiting = False

    @property
    def _changed(self) -> threading.Condition:
        # Made by its first use: gevent replaces the locks of a child after its fork.
        made = vars(self).get("_condition")
        return made or vars(self).setdefault("_condition", threading.Condition())  # type: ignore[no-any-return]

    @property
    def is_up(self) -> bool:
        return self._timer.is_up and not self._is_late and not self._has_failed

    def arm(self, entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        queues = len({entry.queue for entry in entries}) or 1
        limit_s = self._limit_s * (queues + len(entries) * LIMIT_PART_PER_ENTRY)
        return self._wait(self._add(entries), limit_s)

    def arm_soon(self, entries: Sequence[Entry]) -> bool:
        """Arm the entries together with those of other calls. Only many entries are waited for."""
        if len(entries) > MAX_GATHERED_ENTRIES:
            return self.arm(entries)
        left_s = (min(entry.due_us for entry in entries) - self._clock.now_us()) / 1e6
        send_at = monotonic() + min(max(left_s * ARM_DELAY_PART, 0), ARM_DELAY_S)
        return self._add(entries, send_at=max(send_at, self._sent_at + SEND_INTERVAL_S)) is not None

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        drain = (queue, priorities, messages, expires_s)
        return self._wait(self._add(drains=[drain]), self._limit_s)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until all entries are armed, and return False after `timeout_s`."""
        with self._changed:
            if self._next is None or self._has_thread():
                if self._next is not None:
                    self._next.send_at = monotonic()
                    self._changed.notify_all()
                return self._changed.wait_for(
                    lambda: self._next is None and not self._is_sending, timeout_s
                )
        self._send_next()
        return True

    def close(self) -> None:
        """Arm the waiting entries and end the thread. A later call starts another thread."""
        self.flush()
        with self._changed:
            if self._next is None:
                self._thread = None
                self._changed.notify_all()
                atexit.unregister(self._exit)

    def _add(
        self,
        entries: Sequence[Entry] = (),
        drains: Sequence[tuple[Any, ...]] = (),
        send_at: float = -inf,
    ) -> _Batch | None:
        """Give work to the thread. Return None if too much waits already."""
        with self._changed:
            batch = self._next = self._next or _Batch()
            if len(batch.entries) > MAX_WAITING_ENTRIES:
                return None
            batch.entries += entries
            batch.drains += drains
            if send_at < batch.send_at:
                batch.send_at = send_at
                self._changed.notify_all()
            if not self._is_exiting and self._has_thread():
                return batch
        self._send_next()
        return batch

    def _wait(self, batch: _Batch | None, limit_s: float) -> bool:
        """Return whether the work was done. After the limit, the thread continues with it."""
        if batch is None or self._is_late:
            return False
        if not batch.is_over.wait(limit_s):
            with self._changed:
                self._is_late = not batch.is_over.is_set()
        return batch.is_armed

    # -- the thread -------------------------------------------------------------------------------

    def _exit(self) -> None:
        """Arm the waiting entries while the process ends, and leave those of a slow broker to the
        sweep.
        """
        self._is_exiting = True
        self.flush(EXIT_S)

    def _has_thread(self) -> bool:
        """Start the thread if necessary.

        Return False if no thread can be started: at the system's limit, in a subinterpreter without
        daemon threads, or while the interpreter ends.
        """
        if self._thread is not None and self._thread.is_alive():
            return True
        try:
            self._thread = threading.Thread(target=self._run, name="delaytasks-send", daemon=True)
            self._thread.start()
        except RuntimeError:
            self._thread = None
            return False
        atexit.register(self._exit)
        if multiprocessing.process.parent_process() is not None:
            # A child of multiprocessing ends without the functions of atexit.
            multiprocessing.util.Finalize(None, self._exit, exitpriority=0)
        return True

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._changed:
                while self._thread is thread and (
                    self._next is None or (left_s := self._next.send_at - monotonic()) > 0
                ):
                    self._changed.wait(None if self._next is None else left_s)
                if self._thread is not thread:
                    return
            self._send_next()

    def _send_next(self) -> None:
        with self._changed:
            batch, self._next = self._next, None
            if batch is None:
                return
            self._sent_at, self._is_sending = monotonic(), True
        has_failed = True
        try:
            # Near entries first: what a drain finds is late already.
            sent = [self._timer.arm(batch.entries)] if batch.entries or not batch.drains else []
            sent += [self._timer.request_drain(*drain) for drain in batch.drains]
            batch.is_armed, has_failed = all(sent), False
        except Exception:  # the thread has to arm the next entries
            count = len(batch.entries)
            logger.exception("arming %d tasks failed; the sweep will find them", count)
        finally:
            with self._changed:
                self._is_sending = self._is_late = False
                self._has_failed = has_failed
                batch.is_over.set()
                self._changed.notify_all()


class BackgroundTimer:
    """Lets the sender arm the entries of producers, which wait for it only with many entries."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.request_drain = sender.request_drain

    @property
    def is_up(self) -> bool:
        return self._sender.is_up

    def arm(self, entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        return not entries or self._sender.arm_soon(entries)


def can_run_threads() -> bool:
    """Return False in uWSGI without its option `enable-threads`: there a thread stands still
    between the requests.
    """
    uwsgi = sys.modules.get("uwsgi")
    options = {} if uwsgi is None else uwsgi.opt
    # The option `threads` implies `enable-threads`.
    return uwsgi is None or "threads" in options or "enable-threads" in options
