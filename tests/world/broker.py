"""Timers of tests: one that records, and one whose messages wait until a test delivers them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from delaytasks.core.interfaces import Entry


class RecordingTimer:
    def __init__(self) -> None:
        self.armed: list[Entry] = []
        self.disarmed: list[Entry] = []
        self.requested_drains: list[tuple[str, list[int], int]] = []
        self.is_up = True

    def arm(self, entries: Iterable[Entry]) -> bool:
        self.armed += entries if self.is_up else ()
        return self.is_up

    def disarm(self, entries: Iterable[Entry]) -> None:
        self.disarmed += entries

    def request_drain(
        self, queue: str, priorities: Sequence[int], messages: int, expires_s: float
    ) -> bool:
        self.requested_drains.append((queue, list(priorities), messages))
        return self.is_up

    @property
    def ids(self) -> list[int]:
        return [entry.id for entry in self.armed]


class WorldBroker(RecordingTimer):
    """A broker whose messages a test delivers, loses, repeats or reorders.

    `armed` has the entries of the messages that wait, also those that the senders withdrew.
    """

    def lose(self, *ids: int) -> None:
        """Lose the messages of these tasks, or all messages and requests."""
        if ids:
            self.armed = [entry for entry in self.armed if entry.id not in ids]
            return
        self.armed, self.requested_drains = [], []

    def repeat(self) -> None:
        """Deliver each waiting message twice."""
        self.armed += self.armed

    def reorder(self, chance: Random) -> None:
        chance.shuffle(self.armed)

    def take(self, now_us: int) -> list[Entry]:
        """Remove and return the entries that are due."""
        taken = [entry for entry in self.armed if entry.due_us <= now_us]
        self.armed = [entry for entry in self.armed if entry.due_us > now_us]
        return taken

    def take_requested_drains(self) -> list[tuple[str, list[int], int]]:
        taken, self.requested_drains = self.requested_drains, []
        return taken
