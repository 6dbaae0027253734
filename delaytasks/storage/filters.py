"""The conditions of a filter in SQL."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, Table, func, literal_column

from delaytasks.core.filters import Filter
from delaytasks.core.inputs import pair_text
from delaytasks.storage.capabilities import Capabilities
from delaytasks.storage.row_lists import one_of

#: A literal, since an index is over an expression without parameters.
PAIR_SEPARATOR: ColumnElement[str] = literal_column("'\",\"'")

#: Not a backslash, which MySQL's string literals escape, too.
_ESCAPE = "!"


def conditions(tasks: Table, where: Filter, can: Capabilities) -> list[ColumnElement[bool]]:
    """Return the conditions of all filters except `status`, which decides about the index."""
    t = tasks.c
    comparisons = (
        (t.tag, operator.eq, where.tag),
        (t.task_key, operator.eq, where.key),
        (t.queue, operator.eq, where.queue),
        (t.expected_time, operator.ge, where.since),
        (t.expected_time, operator.lt, where.until),
        (t.create_time, operator.ge, where.created_since),
        (t.create_time, operator.lt, where.created_until),
        (t.update_time, operator.lt, where.updated_until),
    )
    found: list[ColumnElement[bool]] = [
        compare(column, value) for column, compare, value in comparisons if value is not None
    ]
    if where.ids is not None:
        ids = sorted(where.ids)
        # The range lets planners leave out partitions.
        found += [one_of(t.id, ids, can), t.id.between(ids[0], ids[-1])]
    if where.key_prefix is not None:
        # Not LIKE, which ignores case in SQLite.
        found.append(func.substr(t.task_key, 1, len(where.key_prefix)) == where.key_prefix)
    if where.error is not None:
        found.append(t.error_stack.like(_like(where.error), escape=_ESCAPE))
    if where.meta is not None:
        found += _has_pairs(tasks.c.meta, where.meta, can)
    return found


def _like(pattern: str) -> str:
    """Return a pattern for LIKE, in which `*` stands for any text."""
    for special in (_ESCAPE, "%", "_"):
        pattern = pattern.replace(special, _ESCAPE + special)
    return pattern.replace("*", "%")


def _has_pairs(
    meta: Column[Any], pairs: Sequence[tuple[str, str]], can: Capabilities
) -> list[ColumnElement[bool]]:
    """Return the conditions that the stored text contains each pair.

    Where a text can be split into an array, the condition is one that an index can serve. The
    outer braces and quotation marks are cut off, and `","` occurs between pairs only.
    """
    texts = [pair_text(*pair) for pair in pairs]
    if not can.text_arrays:
        return [func.instr(meta, text) > 0 for text in texts]
    wanted = func.string_to_array(",".join(texts)[1:-1], PAIR_SEPARATOR)
    stored = func.string_to_array(
        func.left(func.right(meta, literal_column("-2")), literal_column("-2")), PAIR_SEPARATOR
    )
    return [meta.is_not(None), stored.op("@>", is_comparison=True)(wanted)]
