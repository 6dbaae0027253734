"""A world whose statements have plans that a test reads."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

from sqlalchemy import Connection, update

from delaytasks import DelayedTask, Status
from delaytasks.db import bulk_moves
from delaytasks.db.statements import Prepared
from delaytasks.db.store import Store
from delaytasks.operate.health import HealthChecks
from delaytasks.operate.state import find_overdue
from delaytasks.operate.task_calls import bulk_filter_of
from delaytasks.operate.why import Facts
from tests.conftest import new_world
from tests.world.recording import overheard
from tests.world.world import World

run_prepared = Prepared.__call__


class PlannedWorld(World):
    """A world with many rows, and what its processes read of them."""

    # -- rows and their statistics ----------------------------------------------------------------

    def fill(
        self,
        count: int,
        first_s: float,
        step_s: float = 1,
        tags: Sequence[str] = ("mail",),
        **fields: Any,
    ) -> list[DelayedTask]:
        """Insert rows that wait, the first of which is due `first_s` seconds from now."""
        first, step = self.new_row(first_s, **fields), timedelta(seconds=step_s)
        times = [first.expected_time + n * step for n in range(count)]
        made = [
            replace(first, id=first.id + n, tag=tags[n % len(tags)], expected_time=at)
            for n, at in enumerate(times)
        ]
        self.skip_ids(count)
        self.store.tasks.new.insert_many(made)
        return made

    def end(self, until_s: float, status: Status = Status.DONE, **where: Any) -> None:
        """Give the waiting rows that are due until then another status."""
        t, until = self.table(), self.now() + timedelta(seconds=until_s)
        waits = update(t).where(t.c.expected_time < until, t.c.status == 0).filter_by(**where)
        with self.begin() as connection:
            connection.execute(waits.values(status=int(status)))

    def execute(self, statement: str) -> None:
        """Execute a statement outside of transactions."""
        with self.store.database.auto.connect() as connection:
            connection.exec_driver_sql(statement)

    def analyse(self, name: str = "tasks") -> None:
        """Let the planner know the rows of a table."""
        self.execute(f"ANALYZE {'TABLE' * (self.kind == 'mysql')} {self.table(name).name}")

    # -- what processes read ----------------------------------------------------------------------

    def running(self) -> object:
        return self.store.policies.count(Status.RUNNING)

    def overdue(self) -> object:
        return find_overdue(self.store, 1)

    def unserved(self) -> object:
        """Search for queues that no worker serves."""
        self.serve("worker", "served")
        return HealthChecks(self.runtime)._queues_check(Facts(self.runtime))

    def near(self) -> object:
        """Read the rows that a sweep arms."""
        now = self.now()
        return list(self.store.sweeps.due_between(now, now + timedelta(seconds=30), 0, 1))

    def windows(self, move: Any, filters: dict[str, Any], most: int = 2) -> object:
        """Find the rows of the first windows of a bulk call."""
        with mock.patch.object(bulk_moves, "WINDOW", 500):
            which = bulk_filter_of(move, filters, False)
            return list(itertools.islice(self.store.bulk.matching(which), most))

    # -- plans ------------------------------------------------------------------------------------

    def plans(self, work: Callable[[], object], options: str = "") -> str:
        """Return the query plan of each statement of `work`; `options` are those of EXPLAIN."""
        return plans(self.store, work, options)


@contextmanager
def planned_world(url: str, prefix: str, is_analysed: bool = True) -> Iterator[PlannedWorld]:
    """Yield a world with new tables. If `is_analysed` is false, PostgreSQL never analyses them."""
    with new_world(PlannedWorld, url, table_prefix=prefix) as world:
        if world.kind == "postgresql" and not is_analysed:
            world.execute(f"ALTER TABLE {world.table().name} SET (autovacuum_enabled = off)")
        yield world


def plans(store: Store, work: Callable[[], object], options: str = "") -> str:
    """Return the query plan of each statement of `work` that does not only read the policies, which
    are few; `options` are those of EXPLAIN."""
    seen: list[tuple[str, Any]] = []

    def note(statement: str, parameters: Any) -> None:
        if re.search("yb_delay_(?!policy)", statement) and statement.lstrip().upper().startswith(
            ("SELECT", "UPDATE", "WITH")
        ):
            seen.append((statement, parameters))

    def note_prepared(self: Prepared, on: Connection, values: Mapping[str, Any]) -> Any:
        answer = run_prepared(self, on, values)
        if self._made_texts is not None:
            _, execute, names = self._made_texts
            seen.append((execute, tuple(values[name] for name in names)))
        return answer

    with overheard(store, note), mock.patch.object(Prepared, "__call__", note_prepared):
        work()
    return _explain(store, seen, options)


def _explain(store: Store, seen: Sequence[tuple[str, Any]], options: str) -> str:
    kind = store.database.url.get_backend_name()
    words = "EXPLAIN QUERY PLAN " if kind == "sqlite" else f"EXPLAIN {options} "
    found: list[Any] = []

    def explain(connection: Connection, sql: str, given: Any) -> None:
        if store.database.can.prepare:  # the others need a good plan without this
            connection.exec_driver_sql(
                f"SET enable_seqscan = {'off' if sql.startswith('EXECUTE') else 'on'}"
            )
        found.extend(row._mapping for row in connection.exec_driver_sql(words + sql, given))
        if store.database.can.prepare:
            connection.exec_driver_sql("SET enable_seqscan = off")

    assert seen, "no statement was executed"
    for sql, given in seen:
        # This uses the connection that keeps the plan of a prepared statement.
        store.database.autocommitted(partial(explain, sql=sql, given=given))
    if kind == "mysql":
        # Leave out the possible keys, because only the key in use matters.
        return "\n".join(
            f"{row['type']} on {row['table']} using {row['key']}" for row in found if row["table"]
        )
    return "\n".join(str(row.get("QUERY PLAN") or row.get("detail")) for row in found)


def assert_no_scan(shown: str) -> None:
    # A scan of this index from its start only reads the first value. There are few policies and
    # workers.
    table = r"\w*plan_"
    line = rf"(?!{table}yb_delay_(policy|worker|waitlist (using|USING))){table}"
    assert not re.search(f"(Seq Scan on|SCAN|ALL on|index on) {line}", shown), shown
