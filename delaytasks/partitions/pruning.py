"""Old partitions go as a whole, and what must stay of them is moved to the default one before."""

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

from delaytasks.core.errors import StoreError
from delaytasks.core.states import FINISHED
from delaytasks.partitions.table import Partition, Partitions
from delaytasks.storage.task_keys import TaskKeys

#: A partition with more tasks that must stay is left as it is: everybody waits while they are moved.
MOST_MOVED = 10_000
#: Keys that are released in one transaction.
STEP = 500


class Pruned(NamedTuple):
    """What became of an old partition: how many tasks were moved out of it, or none if it is kept for too many."""

    name: str
    moved: int | None


def prune(
    partitions: Partitions, older_than: timedelta, detaches_only: bool = False
) -> Iterator[Pruned]:
    """The partitions that are older, one after the other. The tasks in them that a purge of this age would leave are
    moved to the default partition: those that wait or run keep their ids, versions and leases."""
    before = partitions.now() - older_than
    for part in partitions.all():
        if part.until is not None and part.until < before:
            try:
                moved = _Old(partitions, part, before).prune(detaches_only)
            except StoreError:
                if part.name in {each.name for each in partitions.all()}:
                    raise
                continue  # somebody else has pruned it meanwhile
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
        some = select(self._old.c.id).where(self._stays).limit(MOST_MOVED + 1).subquery()
        if (
            self._db.alone(lambda c: c.execute(select(func.count()).select_from(some)).scalar_one())
            > MOST_MOVED
        ):
            return None
        with self._partitions.advising("the partition is still there"):
            self._db.alone(self._mark)
        keyed = self._db.alone(self._still_keyed)
        moved = self._partitions.in_turn(lambda c: self._move(c, detaches_only))
        for start in range(0, len(keyed), STEP):
            self._release_keys(keyed[start : start + STEP])
        self._forget_attempts()
        return moved

    def _mark(self, connection: Connection) -> None:
        """Makes an index of what must stay. Whatever becomes of it meanwhile, it is found at once when everybody
        waits."""
        made = {"postgresql_where": self._stays, "postgresql_concurrently": True}
        index = Index(f"{self._part.name}_stays", self._old.c.id, **made)  # type: ignore[arg-type]
        index.drop(connection, checkfirst=True)  # one that was left behind
        index.create(connection)

    def _move(self, connection: Connection, detaches_only: bool) -> int:
        tasks, quoted, run = (
            self._partitions.tasks,
            self._partitions.quoted,
            connection.exec_driver_sql,
        )
        # Adopted tables have columns that we know nothing of.
        found = inspect(connection).get_columns(tasks.name, tasks.schema)
        names = [each["name"] for each in found if "computed" not in each]
        parent = Table(
            tasks.name, MetaData(), *(Column(name) for name in names), schema=tasks.schema
        )
        rows: Any = (
            select(*(column(name) for name in names)).select_from(self._old).where(self._stays)
        )
        run(f"ALTER TABLE {quoted()} DETACH PARTITION {quoted(self._part.name)}")
        run("SET LOCAL enable_seqscan = off")  # the planner does not know how few they are
        moved = connection.execute(insert(parent).from_select(names, rows)).rowcount
        if detaches_only:
            connection.execute(delete(self._old).where(self._stays))
        else:
            self._old.drop(connection)
        return moved

    # -- what belonged to tasks that are gone -----------------------------------------------------

    def _still_keyed(self, connection: Connection) -> Sequence[Any]:
        """(id, tag, key) of tasks that another program finished, and whose keys name them still."""
        k, old = self._partitions.schema.keys, self._old
        named = and_(k.c.task_id == old.c.id, k.c.tag == old.c.tag, k.c.task_key == old.c.task_key)
        query = select(k.c.task_id, k.c.tag, k.c.task_key).join(old, named).where(not_(self._stays))
        return connection.execute(query).all()

    def _release_keys(self, rows: Sequence[Any]) -> None:
        keys, id = TaskKeys(self._db, self._partitions.schema), self._partitions.tasks.c.id

        def work() -> None:
            with self._db.begin() as connection:
                locked = keys.lock_all(connection, rows)
                left = set(
                    connection.execute(
                        select(id).where(id.in_([row[0] for row in locked]))
                    ).scalars()
                )
                keys.release_all(connection, [row for row in locked if row[0] not in left])

        self._db.run(work)

    def _forget_attempts(self) -> None:
        attempts, part = self._partitions.schema.attempts, self._part
        id = attempts.c.task_id
        is_gone = ~exists().where(self._partitions.tasks.c.id == id)
        lost = delete(attempts).where(id >= (part.low or 1), id < part.high, is_gone)
        self._db.alone(lambda c: c.execute(lost))
