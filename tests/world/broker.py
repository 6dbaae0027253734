"""A broker whose messages wait until a test delivers, loses, repeats or reorders them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import NamedTuple

from delaytasks.core.interfaces import Entry


class DrainRequest(NamedTuple):
    """A message that asks a worker to claim the due rows of a queue."""

    queue: str
    priorities: tuple[int, ...]
    messages: int


class WorldBroker:
    """Takes the place of the timer and the broker of one `DelayTasks`."""

    def __init__(self) -> None:
        #: Whether the broker accepts messages.
        self.is_up = True
        #: The entries of the messages that wait, in the order in which they were sent.
        self.messages: list[Entry] = []
        self.drain_requests: list[DrainRequest] = []
        #: The entries that the senders withdrew.
        self.withdrawn: list[Entry] = []

    # -- what the timer of delaytasks does --------------------------------------------------------

    def arm(self, entries: Iterable[Entry]) -> bool:
        if self.is_up:
            self.messages += entries
        return self.is_up

    def disarm(self, entries: Iterable[Entry]) -> None:
        """Record the entries. As with a real broker, their messages stay."""
        self.withdrawn += entries

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        if self.is_up:
            self.drain_requests.append(DrainRequest(queue, tuple(priorities), messages))
        return self.is_up

    # -- what a test does -------------------------------------------------------------------------

    @property
    def ids(self) -> list[int]:
        """The ids of the tasks whose messages wait."""
        return [entry.id for entry in self.messages]

    def lose(self, *ids: int) -> None:
        """Lose the messages of these tasks, or all messages and requests."""
        if ids:
            self.messages = [entry for entry in self.messages if entry.id not in ids]
            return
        self.messages, self.drain_requests = [], []

    def repeat(self) -> None:
        """Deliver each waiting message twice."""
        self.messages += self.messages

    def reorder(self, chance: Random) -> None:
        chance.shuffle(self.messages)

    def take(self, now_us: int | None = None) -> list[Entry]:
        """Remove and return the entries that wait; with `now_us`, only those that are due."""
        taken = [entry for entry in self.messages if now_us is None or entry.due_us <= now_us]
        self.messages = [entry for entry in self.messages if entry not in taken]
        return taken

    def take_drain_requests(self) -> list[DrainRequest]:
        taken, self.drain_requests = self.drain_requests, []
        return taken
