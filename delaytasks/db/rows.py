"""Converts between rows and tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from sqlalchemy import Column, ColumnElement, Table, case

from delaytasks.db.schema import BODY, RESULT, Schema
from delaytasks.db.types import db_now
from delaytasks.model.moves import MOST_VERSIONS, MOVES, Status
from delaytasks.model.task import DelayedTask

#: The largest value of an INTEGER column.
MAX_INTEGER = 2**31 - 1
#: The columns in the order of DelayedTask's fields.
COLUMNS = (
    "id tag message_body expected_time status version queue priority task_key delay_time runs "
    "lapses headers limit_key create_time due_time meta cancel_request "
    "update_time execution_time lease_until worker ip_address error_stack result"
).split()
#: The columns that a worker reads of a row that it claims.
CLAIMED = COLUMNS[: COLUMNS.index("update_time")]


def columns(schema: Schema, names: Sequence[str] = COLUMNS) -> list[Column[Any]]:
    return [schema.tasks.c[name] for name in names]


def task_of(row: Sequence[Any], schema: Schema) -> DelayedTask:
    cipher = schema.cipher
    body = row[2] if cipher is None else cipher.read(row[2], BODY, row[0], row[1])
    task = DelayedTask(row[0], row[1], body, row[3], Status(row[4]), *row[5:])
    if cipher is not None and task.result_json is not None:
        task.result_json = cipher.read(task.result_json, RESULT, task.id, task.tag)
    return task


#: The columns of a new row, and the attribute of the task for each.
_ATTRIBUTES = {
    "id": "id",
    "message_body": "body_json",
    "expected_time": "expected_time",
    "task_key": "key",
    "tag": "tag",
    "status": "status",
    "version": "version",
    "delay_time": "delay_s",
    "create_time": "create_time",
    "update_time": "create_time",
    "queue": "queue",
    "priority": "priority",
    "headers": "headers_json",
    "limit_key": "limit_key",
    "meta": "meta_json",
}
NEW_COLUMNS = tuple(_ATTRIBUTES)
#: The first columns, which differ in nearly all rows, or are NULL.
DIFFERING_COLUMNS = 4
_TAG = NEW_COLUMNS.index("tag")
#: The columns of new rows without meta, so that the others cost nothing.
PLAIN_COLUMNS = tuple(name for name in NEW_COLUMNS if name != "meta")
_Values = Callable[[DelayedTask], tuple[Any, ...]]
_values: dict[tuple[str, ...], _Values] = {
    names: attrgetter(*map(_ATTRIBUTES.__getitem__, names))
    for names in (NEW_COLUMNS, PLAIN_COLUMNS)
}


def columns_of(tasks: Iterable[DelayedTask]) -> tuple[str, ...]:
    """Return the columns that these new rows need."""
    return NEW_COLUMNS if any(task.meta_json is not None for task in tasks) else PLAIN_COLUMNS


def new_values(
    tasks: Iterable[DelayedTask], schema: Schema, names: tuple[str, ...] = NEW_COLUMNS
) -> Iterator[tuple[Any, ...]]:
    """Yield the values of the columns as they are stored."""
    rows, cipher = map(_values[names], tasks), schema.cipher
    if cipher is None:
        return rows
    return ((row[0], cipher.seal(row[1], BODY, row[0], row[_TAG]), *row[2:]) for row in rows)


def values_of(task: DelayedTask, schema: Schema) -> dict[str, Any]:
    """Return the row of a new task by column."""
    row = dict(zip(NEW_COLUMNS, next(new_values([task], schema)), strict=True))
    row["status"] = int(task.status)
    return row


def moved(tasks: Table, move: str, **others: Any) -> dict[str, Any]:
    """Return the new values of rows that this move changes; `others` are the columns of its own."""
    return {
        "status": int(MOVES[move].target),
        "version": next_version(tasks.c.version),
        "update_time": db_now(),
        **others,
    }


def next_version(version: Column[int]) -> ColumnElement[int]:
    return case((version < MOST_VERSIONS, version + 1), else_=0)


def one_more(count: Column[int]) -> ColumnElement[int]:
    """Add one, but not beyond the largest integer: such a row of another program must not fail the
    statement."""
    return case((count < MAX_INTEGER, count + 1), else_=count)
