"""The `direct` timer: near tasks wait in the table alone. Workers look for them there, and a database that can tells
them of what is due before they look again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from delaytasks.core.clock import Clock
from delaytasks.core.errors import StoreError
from delaytasks.core.forks import reset_in_child
from delaytasks.core.inputs import is_queue
from delaytasks.core.interfaces import Entry, Executor, NoticeChannel, by_shard
from delaytasks.timers.eta import PER_MESSAGE, read_message

#: Workers that are told look for what is near so often. What is due earlier than this, and a moment, they are told.
LOOK_S, SLACK_S = 1.0, 1.0
#: More than so many notices at once say nothing but that there is something to look for.
MOST_NOTICES = 10
#: Says that there is something to look for.
LOOK = "look"


class DirectTimer:
    def __init__(self, notices: Sequence[NoticeChannel], clock: Clock) -> None:
        #: Of each shard.
        self._notices = notices
        self._clock = clock
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        #: Takes what is near into this process's own wheel, where it is a worker's main process.
        self.take: Callable[[Sequence[Entry]], None] | None = None

    @property
    def is_up(self) -> bool:
        """There is nothing that could be down: without the database there is no task either."""
        return True

    def arm(self, entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        if self.take is not None:
            self.take(entries)
        for shard, some in by_shard(entries, len(self._notices)).items():
            try:
                self.tell(some, shard)
            except StoreError:
                pass  # workers find it when they look
        return True

    def tell(self, entries: Iterable[Entry], shard: int, on: Executor | None = None) -> None:
        """At the commit of the transaction `on`, or at once."""
        if shard >= len(self._notices) or not self._notices[shard].is_possible:
            return
        until = self._clock.now_us() + (LOOK_S + SLACK_S) * 1e6
        if near := [entry for entry in entries if entry.due_us <= until]:
            self._notices[shard].tell(payloads_of(near), on)

    def tell_to_look(self, shard: int) -> None:
        self._notices[shard].tell([LOOK])

    def disarm(self, entries: Iterable[Entry]) -> None:
        """What comes out all the same is refused by the claim."""

    def drain(
        self, queue: str, priorities: Sequence[int], tokens: int, expires_s: float, shard: int = 0
    ) -> bool:
        """Workers look for what is overdue by themselves."""
        return True


def payloads_of(entries: Iterable[Entry]) -> Sequence[str]:
    found = list(_payloads(entries))
    return found if len(found) <= MOST_NOTICES else [LOOK]


def _payloads(entries: Iterable[Entry]) -> Iterator[str]:
    queues: dict[str, list[Entry]] = {}
    for entry in entries:
        # Others are another program's: workers find them when they look.
        if entry.id > 0 and entry.version >= 0 and entry.due_us >= 0 and is_queue(entry.queue):
            queues.setdefault(entry.queue, []).append(entry)
    for queue, some in queues.items():
        for start in range(0, len(some), PER_MESSAGE):
            named = [
                [e.id, e.version, e.due_us, e.priority] for e in some[start : start + PER_MESSAGE]
            ]
            yield json.dumps([queue, named], separators=(",", ":"))


def read_notice(payload: str) -> list[Entry]:
    """Anybody may tell something on the channel: what is not of our form raises `ValueError`."""
    told = json.loads(payload)
    if (
        not isinstance(told, list)
        or len(told) != 2
        or not isinstance(told[0], str)
        or not is_queue(told[0])
    ):
        raise ValueError("not a queue and its entries")
    return read_message([told[1]], told[0]).entries
