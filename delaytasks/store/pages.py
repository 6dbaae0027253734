"""Pages of rows in the order of their due times. A cursor stands for a place, so pages stay right while rows move."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any

from sqlalchemy import Select, Table, and_, or_

from delaytasks.core.clock import from_us, to_us
from delaytasks.core.errors import InvalidQueryError
from delaytasks.core.task import DelayTask
from delaytasks.core.text import shown


def after(query: Select[Any], tasks: Table, cursor: str) -> Select[Any]:
    """`query` from the place on that `cursor` stands for."""
    due, id = _parse_cursor(cursor)
    t = tasks.c
    return query.where(t.expected_time >= due, or_(t.expected_time > due, and_(t.expected_time == due, t.id > id)))


def make_cursor(task: DelayTask) -> str:
    return base64.urlsafe_b64encode(f"{to_us(task.expected_time)}:{task.id}".encode()).decode()


def _parse_cursor(cursor: str) -> tuple[datetime, int]:
    try:
        due_us, _, id = base64.b64decode(cursor.encode(), b"-_", validate=True).decode().partition(":")
        due, after = from_us(int(due_us)), int(id)
    except (AttributeError, ValueError, OverflowError):
        raise InvalidQueryError(f"{shown(cursor)} is not a cursor that find() gave") from None
    if not -(2**63) <= after < 2**63:
        raise InvalidQueryError(f"{shown(cursor)} is not a cursor that find() gave")
    return due, after
