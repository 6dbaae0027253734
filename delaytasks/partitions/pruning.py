"""Drops old partitions, after the tasks that must stay have been moved to the default partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import (
    Column,
    Connection,
    Index,
    MetaData,
    Table,
    and_,
    column,
    delete,
    exists,
    func,
    insert,
    inspect,
    not_,
    select,
)

from delaytasks.core.batches import batches
from delaytasks.core.errors import StoreError
from delaytasks.core.states import FINISHED
from delaytasks.partitions.table import Partition, Partitions
from delaytasks.storage.task_keys import TaskKeys

#: A partition with more tasks that must stay is kept: moving them blocks all other statements.
MAX_MOVED = 10_000
#: Keys that are released in one transaction.
KEYS_PER_TRANSACTION = 500


class Pruned(NamedTuple):
    """An old partition, and how many tasks were moved out of it; None if it is kept since it has
    too many."""

    name: str
    moved: int | None


def prune(
    partitions: Partitions, older_than: timedelta, detaches_only: bool = False
) -> Iterator[Pruned]:
    """Drop the partitions that are older than `older_than`, one after the other.

    Tasks that a purge of this age would leave are moved to the default partition. Tasks that wait
    or run keep their ids, versions and leases.
    """
    before = partitions.now() - older_than
    for part in partitions.all():
        if part.until is not None and part.until < before:
            try:
                moved = _Old(partitions, part, before).prune(detaches_only)
            except StoreError:
                if part.name in {each.name for each in partitions.all()}:
                    raise
                continue  # another process has pruned it meanwhile
            yield Pruned(part.name, moved)


class _Old:
    def __init__(self, partitions: Partitions, part: Partition, before: datetime) -> None:
        self._partitions = partitions
        self._db = partitions.database
        self._part = part
        self._old = old = partitions.table(part.name)
        is_finished = old.c.status.in_([int(status) for status in FINISHED])
        self._stays = not_(
            and_(is_finished, old.c.update_time < before, old.c.expected_time < before)
        )

    def prune(self, detaches_only: bool) -> int | None:
        some = select(self._old.c.id).where(self._stays).limit(MAX_MOVED + 1).subquery()
        count = select(func.count()).select_from(some)
        if self._db.autocommitted(lambda c: c.execute(count).scalar_one()) > MAX_MOVED:
            return None
        with self._partitions.advising("the partition is still there"):
            self._db.autocommitted(self._mark)
        keyed = self._db.autocommitted(self._still_keyed)
        moved = self._partitions.in_turn(lambda c: self._move(c, detaches_only))
        for batch in batches(keyed, KEYS_PER_TRANSACTION):
            self._release_keys(batch)
        self._forget_attempts()
        return moved

    def _mark(self, connection: Connection) -> None:
        """Make an index of the tasks that must stay, so that they are found fast while others
        wait."""
        made = {"postgresql_where": self._stays, "postgresql_concurrently": True}
        index = Index(f"{self._part.name}_stays", self._old.c.id, **made)  # type: ignore[arg-type]
        index.drop(connection, checkfirst=True)  # an interrupted call may have left one
        index.create(connection)

    def _move(self, connection: Connection, detaches_only: bool) -> int:
        tasks, quoted = self._partitions.tasks, self._partitions.quoted
        run = connection.exec_driver_sql
        # Adopted tables have columns that the schema does not contain.
        found = inspect(connection).get_columns(tasks.name, tasks.schema)
        names = [each["name"] for each in found if "computed" not in each]
        parent = Table(
            tasks.name, MetaData(), *(Column(name) for name in names), schema=tasks.schema
        )
        rows: Any = (
            select(*(column(name) for name in names)).select_from(self._old).where(self._stays)
        )
        run(f"ALTER TABLE {quoted()} DETACH PARTITION {quoted(self._part.name)}")
        run("SET LOCAL enable_seqscan = off")  # the planner has no statistics on how few they are
        moved = connection.execute(insert(parent).from_select(names, rows)).rowcount
        if detaches_only:
            deleted = connection.execute(delete(self._old).where(self._stays)).rowcount
            if deleted != moved:
                raise StoreError(
                    f"{moved} tasks of {self._part.name} were copied, but {deleted} deleted; "
                    "nothing was changed"
                )
        else:
            self._old.drop(connection)
        return moved

    # -- keys and attempts of dropped tasks -------------------------------------------------------

    def _still_keyed(self, connection: Connection) -> Sequence[Any]:
        """Return (id, tag, key) of tasks that another program finished, and that still own their
        keys."""
        k, old = self._partitions.schema.keys, self._old
        named = and_(k.c.task_id == old.c.id, k.c.tag == old.c.tag, k.c.task_key == old.c.task_key)
        query = select(k.c.task_id, k.c.tag, k.c.task_key).join(old, named).where(not_(self._stays))
        return connection.execute(query).all()

    def _release_keys(self, rows: Sequence[Any]) -> None:
        keys, id = TaskKeys(self._db, self._partitions.schema), self._partitions.tasks.c.id

        def work(connection: Any) -> None:
            locked = keys.lock_all(connection, rows)
            named = select(id).where(id.in_([row[0] for row in locked]))
            left = set(connection.execute(named).scalars())
            keys.release_all(connection, [row for row in locked if row[0] not in left])

        self._db.transaction(work)

    def _forget_attempts(self) -> None:
        attempts, part = self._partitions.schema.attempts, self._part
        id = attempts.c.task_id
        is_gone = ~exists().where(self._partitions.tasks.c.id == id)
        lost = delete(attempts).where(id >= (part.low or 1), id < part.high, is_gone)
        self._db.autocommitted(lambda c: c.execute(lost))
