"""The `direct` timer: tasks wait only in the table.

Workers poll the table for the rows that are due soon. A database with notifications tells them
about a row that is due before the next poll.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from delaytasks.broker.arming import ENTRIES_PER_MESSAGE, read_message
from delaytasks.model.clock import Clock, reset_in_child
from delaytasks.model.errors import StoreError
from delaytasks.model.filters import batches
from delaytasks.model.inputs import is_queue
from delaytasks.model.task import CallerConnection, Entry, by_queue

if TYPE_CHECKING:
    from delaytasks.db.statements import Notices

#: Workers that receive notifications poll the table this often.
NOTIFIED_POLL_S = 1.0
#: Rows that are due within `NOTIFIED_POLL_S + NOTICE_SLACK_S` are notified.
NOTICE_SLACK_S = 1.0
#: More notifications than this in one call are replaced by `LOOK`.
MAX_NOTICES = 10
#: The notification to poll the table now.
LOOK = "look"
#: The main process of a worker adds the entries to its own timing wheel.
OnArmed = Callable[[Sequence[Entry]], object]


class DirectTimer:
    """Notifies the workers about rows that are due before their next poll."""

    def __init__(self, notices: Notices, clock: Clock) -> None:
        self._notices = notices
        self._clock = clock
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._subscribers: list[OnArmed] = []

    def subscribe(self, subscriber: OnArmed) -> None:
        """Call `subscriber` with the entries that this process arms, until it unsubscribes."""
        self._subscribers.append(subscriber)

    def unsubscribe(self, subscriber: OnArmed) -> None:
        self._subscribers = [known for known in self._subscribers if known != subscriber]

    @property
    def is_up(self) -> bool:
        """Always True: this timer needs only the database."""
        return True

    def arm(self, entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        for subscriber in self._subscribers:
            subscriber(entries)
        try:
            self.notify(entries)
        except StoreError:
            pass  # workers find the rows at their next poll
        return True

    def notify(self, entries: Iterable[Entry], on: CallerConnection | None = None) -> None:
        """Notify workers when the transaction `on` commits, or immediately without one."""
        if not self._notices.is_possible:
            return
        until = self._clock.now_us() + (NOTIFIED_POLL_S + NOTICE_SLACK_S) * 1e6
        if near := [entry for entry in entries if entry.due_us <= until]:
            self._notices.send(payloads_of(near), on)

    def request_poll(self) -> None:
        self._notices.send([LOOK])

    def disarm(self, entries: Iterable[Entry]) -> None:
        """Do nothing: the claim refuses an entry that is no longer valid."""

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        """Do nothing: workers poll the table for overdue rows."""
        return True


def payloads_of(entries: Iterable[Entry]) -> Sequence[str]:
    found = list(_payloads(entries))
    return found if len(found) <= MAX_NOTICES else [LOOK]


def _payloads(entries: Iterable[Entry]) -> Iterator[str]:
    for queue, queued in by_queue(entries).items():
        for some in batches(queued, ENTRIES_PER_MESSAGE):
            notice = [queue, [entry.as_list() for entry in some]]
            yield json.dumps(notice, separators=(",", ":"))


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
