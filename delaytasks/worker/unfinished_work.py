"""Work that a worker leaves to others, since it stops or has too much of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from celery.utils.log import get_logger

from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, Timer
from delaytasks.core.settings import Settings

if TYPE_CHECKING:
    from delaytasks.storage.sweep_queries import SweepQueries

logger = get_logger(__name__)


class UnfinishedWork(NamedTuple):
    """Entries, and queues that have more due rows in the table."""

    entries: list[Entry]
    #: The queues whose drains it had started, with their priorities (none if only their waitlists
    #: were served).
    queues: list[tuple[str, set[int]]]
    #: How many drain messages are sent for each queue; None means the setting `drain_messages`.
    messages: int | None = None


class WorkSender:
    """Sends unfinished work back to the timer, so that other workers get it in time."""

    def __init__(
        self, settings: Settings, timer: Timer, sweeps: SweepQueries, events: Events
    ) -> None:
        self._settings = settings
        self._timer = timer
        self._sweeps = sweeps
        self._events = events

    def send_back(self, work: UnfinishedWork) -> None:
        if work.entries:
            if self._timer.arm(work.entries):
                logger.info("delaytasks: sent back %d near tasks", len(work.entries))
            else:
                # The next sweep arms all near tasks again.
                self._events.attempt("stop", "forget", self._sweeps.forget_armed)
        messages = self._settings.drain_messages if work.messages is None else work.messages
        for queue, priorities in work.queues:
            self._timer.request_drain(queue, sorted(priorities), messages, self._settings.sweep_s)
