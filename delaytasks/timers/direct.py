"""The `direct` timer: tasks wait only in the table.

Workers poll the table for the rows that are due soon. A database with notifications tells them
about a row that is due before the next poll.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from delaytasks.core.clock import Clock
from delaytasks.core.errors import StoreError
from delaytasks.core.forks import reset_in_child
from delaytasks.core.inputs import is_queue
from delaytasks.core.interfaces import Entry, Executor, NoticeChannel, by_shard
from delaytasks.timers.eta import ENTRIES_PER_MESSAGE, read_message

#: Workers that receive notifications poll the table this often.
LOOK_S = 1.0
#: Rows that are due within `LOOK_S + SLACK_S` are notified.
SLACK_S = 1.0
#: More notifications than this in one call are replaced by `LOOK`.
MAX_NOTICES = 10
#: The notification to poll the table now.
LOOK = "look"


class DirectTimer:
    """Notifies the workers about rows that are due before their next poll."""

    def __init__(self, notices: Sequence[NoticeChannel], clock: Clock) -> None:
        #: The channels, by shard.
        self._notices = notices
        self._clock = clock
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        #: In a worker's main process: adds entries to its own timing wheel.
        self.take: Callable[[Sequence[Entry]], None] | None = None

    @property
    def is_up(self) -> bool:
        """Always True: this timer needs only the database."""
        return True

    def arm(self, entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        if self.take is not None:
            self.take(entries)
        for shard, some in by_shard(entries, len(self._notices)).items():
            try:
                self.tell(some, shard)
            except StoreError:
                pass  # workers find the rows at their next poll
        return True

    def tell(self, entries: Iterable[Entry], shard: int, on: Executor | None = None) -> None:
        """Notify workers when the transaction `on` commits, or immediately without one."""
        if shard >= len(self._notices) or not self._notices[shard].is_possible:
            return
        until = self._clock.now_us() + (LOOK_S + SLACK_S) * 1e6
        if near := [entry for entry in entries if entry.due_us <= until]:
            self._notices[shard].tell(payloads_of(near), on)

    def tell_to_look(self, shard: int) -> None:
        self._notices[shard].tell([LOOK])

    def disarm(self, entries: Iterable[Entry]) -> None:
        """Do nothing: the claim refuses an entry that is no longer valid."""

    def drain(
        self, queue: str, priorities: Sequence[int], tokens: int, expires_s: float, shard: int = 0
    ) -> bool:
        """Do nothing: workers poll the table for overdue rows."""
        return True


def payloads_of(entries: Iterable[Entry]) -> Sequence[str]:
    found = list(_payloads(entries))
    return found if len(found) <= MAX_NOTICES else [LOOK]


def _payloads(entries: Iterable[Entry]) -> Iterator[str]:
    queues: dict[str, list[Entry]] = {}
    for entry in entries:
        # Another program wrote the other rows: workers find them at their next poll.
        if entry.id > 0 and entry.version >= 0 and entry.due_us >= 0 and is_queue(entry.queue):
            queues.setdefault(entry.queue, []).append(entry)
    for queue, some in queues.items():
        for start in range(0, len(some), ENTRIES_PER_MESSAGE):
            named = [
                [e.id, e.version, e.due_us, e.priority]
                for e in some[start : start + ENTRIES_PER_MESSAGE]
            ]
            yield json.dumps([queue, named], separators=(",", ":"))


def read_notice(payload: str) -> list[Entry]:
    """Return the entries of a notification, or raise `ValueError` if it is malformed.

    Any client of the database can send notifications.
    """
    notice = json.loads(payload)
    if (
        not isinstance(notice, list)
        or len(notice) != 2
        or not isinstance(notice[0], str)
        or not is_queue(notice[0])
    ):
        raise ValueError("not a queue and its entries")
    return read_message([notice[1]], notice[0]).entries
