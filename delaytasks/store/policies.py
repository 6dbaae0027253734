"""The table of policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sqlalchemy import and_, delete, func, literal_column, or_, select, update

from delaytasks.core.policies import Kind, Policy
from delaytasks.core.states import Status
from delaytasks.store.database import Database
from delaytasks.store.inserts import Insert
from delaytasks.store.schema import Schema
from delaytasks.store.types import db_now


class PolicyTable:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._p = p = schema.policies
        self._t = schema.tasks
        self._insert = Insert(database, p, ("kind", "name", "is_paused", "version"))
        self._columns = [p.c[field.name] for field in fields(Policy) if field.name in p.c]
        self._all = select(*self._columns).order_by(p.c.kind, p.c.name)

    def read(self) -> list[Policy]:
        return self._db.alone(lambda c: [Policy(*row) for row in c.execute(self._all)])

    def of(self, tag: str, queue: str) -> list[Policy]:
        """Return the policies of a tag and of a queue."""
        query = self._all.where(or_(self._named("tag", tag), self._named("queue", queue)))
        return self._db.alone(lambda c: [Policy(*row) for row in c.execute(query)])

    def set(self, kind: Kind, name: str, changes: Mapping[str, Any], by: str) -> tuple[Policy, bool]:
        """As it is now, and whether that is news. One that nobody has, and that says nothing, is not written."""
        p, mine = self._p, self._named(kind, name)
        query = select(*self._columns).where(mine)

        def is_same(known: Policy) -> bool:
            return all(getattr(known, field) == value for field, value in changes.items())

        def work() -> tuple[Policy, bool]:
            with self._db.begin() as connection:
                row = connection.execute(query.with_for_update()).first()
                known = Policy(kind, name) if row is None else Policy(*row)
                if row is None and not is_same(known):
                    self._insert(connection, {"kind": kind, "name": name, "is_paused": False, "version": 0})
                    known = Policy(*connection.execute(query.with_for_update()).one())
                if is_same(known):
                    return known, False
                values = {**changes, "version": p.c.version + 1, "update_time": db_now(), "updated_by": by}
                connection.execute(update(p).where(mine).values(**values))
                return Policy(*connection.execute(query).one()), True

        return self._db.run(work)

    def applied(self, policy: Policy) -> None:
        """All rows are held or released as this version says. One that says nothing any more goes."""
        p = self._p
        mine = and_(self._named(policy.kind, policy.name), p.c.version == policy.version)
        done: Any = delete(p).where(mine) if policy.is_empty else update(p).where(mine)
        if not policy.is_empty:
            done = done.values(applied_version=policy.version)
        self._db.alone(lambda c: c.execute(done))

    def held(self) -> dict[tuple[str, str], int]:
        """How many rows are held, by tag and queue."""
        return self._count(Status.HELD)

    def running(self) -> dict[tuple[str, str], int]:
        """How many rows run, by tag and queue."""
        return self._count(Status.RUNNING)

    def _count(self, status: Status) -> dict[tuple[str, str], int]:
        t = self._t
        query = select(t.c.tag, t.c.queue, func.count()).where(t.c.status == literal_column(f"{status:d}"))
        rows = self._db.alone(lambda c: c.execute(query.group_by(t.c.tag, t.c.queue)).all())
        return {(row[0], row[1]): row[2] for row in rows}

    def _named(self, kind: Kind, name: str) -> Any:
        return and_(self._p.c.kind == kind, self._p.c.name == name)
