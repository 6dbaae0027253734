"""The stored form of counts: a minute is JSON, and an hour or a day is compressed JSON.

The largest times of a minute are columns of their own, so that workers of an earlier version can
read the JSON.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from delaytasks.core.body import dump_json
from delaytasks.core.run_counts import RunCounts

#: The parts of `RunCounts.as_list` that are numbers by position.
_LISTS = {"o": 0, "l": 4, "d": 5}
#: The length of the JSON list of a minute.
_MINUTE_LENGTH = 6
#: The names of columns whose parts have a largest value instead of a sum.
_HIGHEST = ("lateness_max_ms", "duration_max_ms")


def minute_text(counts: RunCounts) -> str:
    return dump_json(counts.as_list()[:_MINUTE_LENGTH])


def counts_of(
    text: str, lateness_max_s: float | None = None, duration_max_s: float | None = None
) -> RunCounts:
    """Read a minute. A text of another program counts nothing."""
    try:
        stored = list(json.loads(text))[:_MINUTE_LENGTH]
        return RunCounts.of([*stored, lateness_max_s, duration_max_s])
    except (ValueError, TypeError, IndexError):
        return RunCounts()


def packed_counts(parts: Mapping[int, RunCounts], size: int) -> bytes:
    """Return the counts of up to `size` minutes or hours, number by number.

    The values of one bucket in all parts are similar, so they take little space when compressed.
    """
    columns: dict[str, list[int]] = {}

    def put(name: str, part: int, value: int) -> None:
        if value:
            columns.setdefault(name, [0] * size)[part] = value

    for part, counts in parts.items():
        stored = counts.as_list()
        for letter, position in _LISTS.items():
            pairs = stored[position]
            for number, count in zip(pairs[::2], pairs[1::2], strict=True):
                put(f"{letter}{number}", part, count)
        put("on_time", part, counts.on_time)
        put("late", part, counts.late)
        put("lateness_ms", part, round(counts.lateness_s * 1000))
        put("duration_ms", part, round(counts.duration_s * 1000))
        put("lateness_max_ms", part, ceil(counts.lateness_max_s * 1000))
        put("duration_max_ms", part, ceil(counts.duration_max_s * 1000))
    return zlib.compress(dump_json(columns).encode(), 9)


def unpacked_counts(packed: bytes) -> dict[int, RunCounts]:
    """Read what `packed_counts` returned; a value of another program has no parts."""
    try:
        columns: dict[str, Sequence[int]] = json.loads(zlib.decompress(packed))
        numbers = {n for column in columns.values() for n, value in enumerate(column) if value}
        return {number: _part(columns, number) for number in sorted(numbers)}
    except (ValueError, TypeError, IndexError, AttributeError, zlib.error):
        return {}


def unpacked_total(packed: bytes) -> RunCounts | None:
    """Read the sum of all parts that `packed_counts` returned; None if there are none."""
    try:
        columns: dict[str, Sequence[int]] = json.loads(zlib.decompress(packed))
        totals = {
            name: (max if name in _HIGHEST else sum)(column) for name, column in columns.items()
        }
        found = {name: total for name, total in totals.items() if total}
        return _counts_of(found) if found else None
    except (ValueError, TypeError, IndexError, AttributeError, zlib.error):
        return None


def _part(columns: Mapping[str, Sequence[int]], number: int) -> RunCounts:
    return _counts_of({name: column[number] for name, column in columns.items() if column[number]})


def _counts_of(values: Mapping[str, int]) -> RunCounts:
    stored: list[Any] = [
        [],
        [values.get("on_time", 0), values.get("late", 0)],
        values.get("lateness_ms", 0) / 1000,
        values.get("duration_ms", 0) / 1000,
        [],
        [],
        *(values[name] / 1000 if name in values else None for name in _HIGHEST),
    ]
    for name, value in values.items():
        position = _LISTS.get(name[0])
        if position is not None and name[1:].isdigit():
            stored[position] += [int(name[1:]), value]
    return RunCounts.of(stored)
