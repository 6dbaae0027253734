"""Read the plans of statements."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

from sqlalchemy import Connection, event

from delaytasks.storage.row_lists import Prepared
from delaytasks.storage.store import Store

run_prepared = Prepared.__call__


def plans(store: Store, work: Callable[[], object], options: str = "") -> str:
    """Return the query plan of each statement of `work`; `options` are those of EXPLAIN."""
    seen: list[tuple[str, Any]] = []

    def note(
        _c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool
    ) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "UPDATE", "WITH")):
            seen.append((statement, parameters))

    def note_prepared(self: Prepared, on: Connection, values: Mapping[str, Any]) -> Any:
        answer = run_prepared(self, on, values)
        if self._made_texts is not None:
            _, execute, names = self._made_texts
            seen.append((execute, tuple(values[name] for name in names)))
        return answer

    for engine in (store.database.auto, store.database.tx):
        event.listen(engine, "before_cursor_execute", note)
    with mock.patch.object(Prepared, "__call__", note_prepared):
        work()
    for engine in (store.database.auto, store.database.tx):
        event.remove(engine, "before_cursor_execute", note)
    return _explain(store, seen, options)


def _explain(store: Store, seen: Sequence[tuple[str, Any]], options: str) -> str:
    is_sqlite = store.database.url.get_backend_name() == "sqlite"
    words = "EXPLAIN QUERY PLAN " if is_sqlite else f"EXPLAIN {options} "
    found: list[Any] = []

    def explain(connection: Connection, sql: str, given: Any) -> None:
        if store.database.can.prepare:  # the others need a good plan without this
            connection.exec_driver_sql(
                f"SET enable_seqscan = {'off' if sql.startswith('EXECUTE') else 'on'}"
            )
        found.extend(row._mapping for row in connection.exec_driver_sql(words + sql, given))
        if store.database.can.prepare:
            connection.exec_driver_sql("SET enable_seqscan = off")

    for sql, given in seen:
        # This uses the connection that keeps the plan of a prepared statement.
        store.database.autocommitted(partial(explain, sql=sql, given=given))
    if store.database.url.get_backend_name() == "mysql":
        # Leave out the possible keys, because only the key in use matters.
        return "\n".join(
            f"{row['type']} on {row['table']} using {row['key']}" for row in found if row["table"]
        )
    return "\n".join(str(row.get("QUERY PLAN") or row.get("detail")) for row in found)


def assert_no_scan(shown: str) -> None:
    # A scan of this index from its start only reads the first value.
    table = r"\w*plan_"
    line = rf"(?!{table}yb_delay_waitlist (using|USING)){table}"
    assert not re.search(
        f"Seq Scan on {table}|SCAN {line}|ALL on {table}|index on {line}", shown
    ), shown
