"""Counts tasks at a bounded cost, however large the table is."""

from __future__ import annotations

from typing import Any, NamedTuple

from django.db import connections
from sqlalchemy import func, select

from delaytasks.contrib.django.connection import DjangoConnection
from delaytasks.contrib.django.instance import DjangoDelays
from delaytasks.core.filters import Filter
from delaytasks.runtime import runtime_of
from delaytasks.storage.estimates import estimate
from delaytasks.storage.filters import conditions
from delaytasks.storage.queue_levels import has_status

#: A larger number of tasks is the planner's estimate.
MAX_EXACT_COUNT = 10_000


class TaskCount(NamedTuple):
    tasks: int
    #: "about ", "more than ", or empty if the number is exact.
    precision: str = ""

    def __str__(self) -> str:
        return f"{self.precision}{self.tasks:,}"


def count_tasks(delays: DjangoDelays, where: Filter, reads_rows: bool = True) -> TaskCount:
    """Return the number of tasks that match.

    Without `reads_rows`, the database estimates the number. SQLite has no estimates and counts.
    """
    store = runtime_of(delays).store
    connection: Any = DjangoConnection(connections[delays.alias])
    t, can = store.schema.tasks, store.database.can
    query = select(t.c.id).where(*conditions(t, where, can))
    if where.status is not None:
        query = query.where(has_status(t, *where.status))
    guess = estimate(connection, query) if can.estimates else 0
    if guess > MAX_EXACT_COUNT or (can.estimates and not reads_rows):
        return TaskCount(guess, "about ")
    first = query.limit(MAX_EXACT_COUNT + 1).subquery()
    counted = int(connection.execute(select(func.count()).select_from(first)).scalar_one())
    return (
        TaskCount(MAX_EXACT_COUNT, "more than ")
        if counted > MAX_EXACT_COUNT
        else TaskCount(counted)
    )
