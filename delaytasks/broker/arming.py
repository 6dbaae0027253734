"""Arms near rows by messages with an eta, in the calling thread or in a thread of the producer."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.process
import multiprocessing.util
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from math import inf
from typing import Any, NamedTuple

from billiard.exceptions import SoftTimeLimitExceeded

from delaytasks.broker.publisher import Publisher
from delaytasks.model.clock import Clock, from_us, monotonic, reset_in_child
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.filters import batches
from delaytasks.model.ids import check_id
from delaytasks.model.inputs import MAX_PRIORITY, is_queue
from delaytasks.model.task import Entry, Timer, by_queue
from delaytasks.model.text import count

RUN = "delaytasks.run"
#: The Celery task that sweeps; beat sends it.
SWEEP = "delaytasks.sweep"
#: The entries in one message, which costs as much as a message with one entry.
ENTRIES_PER_MESSAGE = 100
#: The beginning of the year 10000, which no `datetime` can represent.
MAX_DUE_US = 253_402_300_800_000_000


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
        sent = [
            self._publisher.send(RUN, queue, list(_messages(some)))
            for queue, some in by_queue(entries).items()
        ]
        return all(sent)

    def disarm(self, entries: Iterable[Entry]) -> None:
        """Do nothing: the message stays in the broker, and the claim refuses its old version."""

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        """Send drain messages. A worker that receives one starts a drain of `queue`."""
        if not is_queue(queue):
            return False
        expires = self._clock.now() + timedelta(seconds=expires_s)
        wanted = {"drain": list(priorities)}
        message: tuple[list[Any], dict[str, Any]] = ([[], wanted], {"expires": expires})
        return self._publisher.send(RUN, queue, [message] * messages)


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


# -- Arms entries in a thread of the producer, which makes the call of the producer shorter -------


logger = logging.getLogger("delaytasks")
#: A call with more entries arms them itself: for each of them the round trip hardly counts, and a
#: producer of many tasks must not be faster than the broker.
MAX_GATHERED_ENTRIES = 100
#: The number of entries that wait for the thread. Further ones are not armed: the sweep finds their
#: rows.
MAX_WAITING_ENTRIES = 100_000
#: Entries wait for others this long, and not longer than this part of the time until the first one
#: is due.
ARM_DELAY_S, ARM_DELAY_PART = 0.1, 0.1
#: The thread begins to send no more often than this. In a loop of calls whose tasks are due
#: immediately, it would otherwise send a message for each call, which takes longer than the call.
SEND_INTERVAL_S = 0.002


class BackgroundTimer:
    """Arms together the entries of several calls.

    A thread that wakes for each entry would cost the caller more time than it saves. The caller
    arms its entries itself if no thread can be started, and while the interpreter ends.
    """

    def __init__(self, timer: Timer, clock: Clock) -> None:
        self._timer = timer
        self._clock = clock
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        """Forget the entries of the parent process, whose thread arms them."""
        vars(self).pop("_condition", None)
        self._waiting: list[Entry] = []
        self._send_at: float | None = None
        self._sent_at = -inf
        self._is_sending = False
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
        return self._timer.is_up

    def arm(self, entries: Iterable[Entry]) -> bool:
        """Arm the entries soon. No error escapes, since the rows are written already."""
        entries = list(entries)
        try:
            return not entries or self._arm(entries)
        except SoftTimeLimitExceeded:
            raise
        except Exception:
            logger.exception("arming %d tasks failed; the sweep will find them", len(entries))
            return False

    def _arm(self, entries: Sequence[Entry]) -> bool:
        if len(entries) <= MAX_GATHERED_ENTRIES:
            left_s = (min(entry.due_us for entry in entries) - self._clock.now_us()) / 1e6
            send_at = monotonic() + min(max(left_s * ARM_DELAY_PART, 0), ARM_DELAY_S)
            with self._changed:
                send_at = max(send_at, self._sent_at + SEND_INTERVAL_S)
                if len(self._waiting) > MAX_WAITING_ENTRIES:
                    return False
                if not self._is_exiting and self._has_thread():
                    self._waiting.extend(entries)
                    if self._send_at is None or send_at < self._send_at:
                        self._send_at = send_at
                        self._changed.notify_all()
                    return True
        return self._timer.arm(entries)

    def disarm(self, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        names = {(entry.id, entry.version) for entry in entries}
        with self._changed:
            self._waiting = [
                entry for entry in self._waiting if (entry.id, entry.version) not in names
            ]
        self._timer.disarm(entries)

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        return self._timer.request_drain(queue, priorities, messages, expires_s)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until all entries are armed, and return False after `timeout_s`."""
        with self._changed:
            if not self._waiting or self._has_thread():
                if self._waiting:
                    self._send_at = monotonic()
                    self._changed.notify_all()
                return self._changed.wait_for(
                    lambda: not self._waiting and not self._is_sending, timeout_s
                )
            entries, self._waiting = self._waiting, []
        return self._timer.arm(entries)

    def close(self) -> None:
        """Arm the waiting entries and end the thread. A later call starts another thread."""
        self.flush()
        with self._changed:
            if not self._waiting:
                self._thread = None
                self._changed.notify_all()
                atexit.unregister(self._exit)

    def _exit(self) -> None:
        """Arm the waiting entries while the process ends, and leave those of a slow broker to the
        sweep.
        """
        self._is_exiting = True
        self.flush()

    def _has_thread(self) -> bool:
        """Start the thread if necessary.

        Return False if no thread can be started: at the system's limit, in a subinterpreter without
        daemon threads, or while the interpreter ends.
        """
        if self._thread is not None and self._thread.is_alive():
            return True
        try:
            self._thread = threading.Thread(target=self._send, name="delaytasks-arm", daemon=True)
            self._thread.start()
        except RuntimeError:
            self._thread = None
            return False
        atexit.register(self._exit)
        if multiprocessing.process.parent_process() is not None:
            # A child of multiprocessing ends without the functions of atexit.
            multiprocessing.util.Finalize(None, self._exit, exitpriority=0)
        return True

    def _send(self) -> None:
        thread = threading.current_thread()
        while True:
            with self._changed:
                while self._thread is thread and (
                    self._send_at is None or (left_s := self._send_at - monotonic()) > 0
                ):
                    self._changed.wait(None if self._send_at is None else left_s)
                if self._thread is not thread:
                    return
                entries, self._waiting = self._waiting, []
                self._send_at, self._sent_at, self._is_sending = None, monotonic(), True
            try:
                self._timer.arm(entries)
            except Exception:  # the thread has to arm the next entries
                logger.exception("arming %d tasks failed; the sweep will find them", len(entries))
            finally:
                with self._changed:
                    self._is_sending = False
                    self._changed.notify_all()


def can_run_threads() -> bool:
    """Return False in uWSGI without its option `enable-threads`: there a thread stands still
    between the requests.
    """
    uwsgi = sys.modules.get("uwsgi")
    options = {} if uwsgi is None else uwsgi.opt
    # The option `threads` implies `enable-threads`.
    return uwsgi is None or "threads" in options or "enable-threads" in options
