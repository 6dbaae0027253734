"""The `eta` timer: tasks wait as Celery messages, and in the timing wheel of the worker that
received them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

from delaytasks.core.clock import Clock, from_us
from delaytasks.core.errors import InvalidInputError
from delaytasks.core.filters import batches
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import MAX_PRIORITY, is_queue
from delaytasks.core.interfaces import Entry, by_queue
from delaytasks.core.text import count
from delaytasks.timers.publisher import Publisher

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
