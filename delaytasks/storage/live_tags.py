"""Counts the unfinished tasks of each tag, among a bounded number of rows."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import NamedTuple

from sqlalchemy import Connection, select

from delaytasks.core.states import LIVE, Status
from delaytasks.storage.queue_levels import has_status, steps
from delaytasks.storage.schema import Schema

#: The rows of each status that are read in each queue, and the queues.
MOST_TAG_ROWS, MOST_TAG_QUEUES = 1_000, 100


class LiveTags(NamedTuple):
    """The number of unfinished tasks of each tag."""

    tasks: dict[str, int]
    #: Whether there are rows that were not read, so that each number is a minimum.
    is_capped: bool


def live_tags(connection: Connection, schema: Schema) -> LiveTags:
    """Count the first rows of each queue. Each statement reads a bounded part of an index."""
    found: Counter[str] = Counter()
    is_capped = False
    for status in sorted(LIVE):
        queues = steps(connection, schema.tasks.c.queue, has_status(schema.tasks, status))
        for number, queue in enumerate(islice(queues, MOST_TAG_QUEUES + 1)):
            tags = [] if number == MOST_TAG_QUEUES else _tags(connection, schema, status, queue)
            is_capped = is_capped or number == MOST_TAG_QUEUES or len(tags) > MOST_TAG_ROWS
            found.update(tags[:MOST_TAG_ROWS])
    return LiveTags(dict(sorted(found.items())), is_capped)


def _tags(connection: Connection, schema: Schema, status: Status, queue: str) -> list[str]:
    """Return the tags of the first rows of a queue, and of one more if there are more."""
    t = schema.tasks
    query = select(t.c.tag).where(has_status(t, status), t.c.queue == queue)
    # The order of the index: otherwise PostgreSQL may read the whole table to find the rows.
    query = query.order_by(t.c.priority, t.c.expected_time).limit(MOST_TAG_ROWS + 1)
    return list(connection.scalars(query))
