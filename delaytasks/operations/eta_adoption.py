"""Moves the messages with an eta that wait in a broker into the table.

For each batch of messages the rows are committed before the messages are removed. If the process
dies in between, the next call finds a row for each of these messages and only removes them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.core.celery_calls import CeleryCall
from delaytasks.core.errors import BodyEncryptedError, InvalidInputError
from delaytasks.core.interfaces import OnConflict
from delaytasks.core.new_task import NewTask
from delaytasks.operations.celery_tasks import CeleryTasks

if TYPE_CHECKING:
    from delaytasks.durable_eta.waiting_message import (
        FoundMessage,
        MessageSource,
        WaitingMessage,
    )
    from delaytasks.sharding.router import Router

#: The reasons that a result remembers.
MOST_REASONS = 10


@dataclass
class DueRange:
    """The messages of one Celery task, and when the first and the last of them are due."""

    first: datetime
    last: datetime
    count: int = 0

    def add(self, due: datetime) -> None:
        self.count += 1
        self.first, self.last = min(self.first, due), max(self.last, due)


@dataclass
class AdoptionResult:
    """The numbers of messages that were adopted, and of those that stay."""

    #: Messages that are rows now, or would be without the dry run.
    adopted: int = 0
    #: Messages whose row an earlier call had written.
    existing: int = 0
    #: Messages with rows that a worker took at the same time, and that may run twice.
    taken: int = 0
    #: The messages that stay where they are, by reason: `no_eta`, `not_durable`, `unreadable`,
    #: `refused`.
    stay: Counter[str] = field(default_factory=Counter)
    #: Reasons of unreadable and refused messages.
    reasons: list[str] = field(default_factory=list)
    #: The adopted messages, by the name of the Celery task.
    tasks: dict[str, DueRange] = field(default_factory=dict)

    @property
    def read(self) -> int:
        return self.adopted + self.existing + self.stay.total()

    def add(self, waiting: WaitingMessage) -> None:
        self.adopted += 1
        due = waiting.due
        self.tasks.setdefault(waiting.task, DueRange(due, due)).add(due)

    def keep(self, kind: str, reason: str) -> None:
        self.stay[kind] += 1
        if len(self.reasons) < MOST_REASONS:
            self.reasons.append(reason)


class EtaAdoption:
    """Reads messages, writes their rows, and removes the messages.

    Parameters
    ----------
    celery_app
        The Celery app.
    celery_tasks
        Says which calls become rows. The same rule holds for their messages.
    router
        Writes the rows.
    is_dry_run
        Whether to count the messages only.
    limit
        The most messages to adopt; None for all.
    """

    def __init__(
        self,
        celery_app: Any,
        celery_tasks: CeleryTasks,
        router: Router,
        is_dry_run: bool = False,
        limit: int | None = None,
    ) -> None:
        self._app = celery_app
        self._celery_tasks = celery_tasks
        self._router = router
        self._is_dry_run = is_dry_run
        self._limit = limit
        self.result = AdoptionResult()

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self._limit is not None and self._taken_over >= self._limit

    @property
    def _taken_over(self) -> int:
        return self.result.adopted + self.result.existing

    def adopt(self, source: MessageSource, on_batch: Callable[[], None]) -> None:
        """Adopt the messages of a source, and call `on_batch` after each batch."""
        try:
            while not self.is_full and (found := source.batch()):
                self._adopt(source, found)
                on_batch()
        finally:
            source.close()

    def _adopt(self, source: MessageSource, found: Sequence[FoundMessage]) -> None:
        chosen: list[_Chosen] = []
        for each in found:
            if self._limit is not None and self._taken_over + len(chosen) >= self._limit:
                break
            if one := self._chosen(each):
                chosen.append(one)
        rows = {one.identity: one.row for one in chosen}
        existing = self._stored(rows.values())
        missing = rows.keys() - existing
        refused = set() if self._is_dry_run else self._write([rows[each] for each in missing])
        for one in chosen:
            if one.identity in existing:
                self.result.existing += 1
            elif one.identity not in refused:
                self.result.add(one.waiting)
        if not self._is_dry_run:
            done = [one.found for one in chosen if one.identity not in refused]
            self.result.taken += len(done) - source.remove(done)

    def _chosen(self, found: FoundMessage) -> _Chosen | None:
        """Return the message with its row if a call with its eta would become a row."""
        from delaytasks.durable_eta.waiting_message import UnreadableMessageError, read

        queue = found.queue if found.queue in self._app.amqp.queues else None
        try:
            waiting = read(found.message, self._app, queue)
            row = None if waiting is None else waiting.as_row()
        except UnreadableMessageError as error:
            self.result.keep("unreadable", f"a message in {found.queue}: {error}")
            return None
        if waiting is None or row is None:
            self.result.stay["no_eta"] += 1
            return None
        call = CeleryCall(waiting.task, eta=waiting.due)
        if not self._celery_tasks.is_durable(call, self._app.tasks.get(waiting.task), None):
            self.result.stay["not_durable"] += 1
            return None
        return _Chosen(found, waiting, row, _identity(row.tag, row.key, row.body))

    # -- rows -------------------------------------------------------------------------------------

    def _stored(self, rows: Iterable[NewTask]) -> set[_Identity]:
        """Return the messages that have a row, whatever its status is."""
        keys = [row.key for row in rows if row.key is not None]
        stored = set()
        for shard in self._router.shards:
            for task in shard.store.celery_rows.of_keys(keys):
                try:
                    stored.add(_identity(task.tag, task.key, task.body))
                except BodyEncryptedError:
                    raise  # without the encryption key, the message of the row is unknown
                except ValueError:
                    pass  # another program wrote something else
        return stored

    def _write(self, rows: list[NewTask]) -> set[_Identity]:
        """Write the rows; return those that are refused."""
        refused = self._schedule(rows, "keep")
        # A row of another call with the same id may have the key. Both calls are to run.
        named = {_identity(row.tag, row.key, row.body): row for row in rows}
        others = named.keys() - refused - self._stored(rows)
        return refused | self._schedule([named[each] for each in others], "take")

    def _schedule(self, rows: list[NewTask], on_conflict: OnConflict) -> set[_Identity]:
        try:
            self._router.schedule_many(rows, on_conflict, None, None)
        except InvalidInputError as error:
            if len(rows) > 1:  # all rows are checked before the first is written
                return set().union(*(self._schedule([row], on_conflict) for row in rows))
            (row,) = rows
            self.result.keep("refused", f"{row.tag} {row.key}: {error}")
            return {_identity(row.tag, row.key, row.body)}
        return set()


#: The tag, the key and the JSON of the body of a row.
_Identity = tuple[str, str | None, str]


class _Chosen(NamedTuple):
    """A message to adopt."""

    found: FoundMessage
    waiting: WaitingMessage
    row: NewTask
    identity: _Identity


def _identity(tag: str, key: str | None, body: Any) -> _Identity:
    return tag, key, json.dumps(body, sort_keys=True)
