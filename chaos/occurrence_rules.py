"""The checker's rules for recurring schedules.

Each occurrence has exactly one task, unless the schedule's policy leaves it out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from chaos.history import Occurrence, Occurrences
from chaos.violation import Violation


def violations_of(some: Occurrences) -> Iterator[Violation]:
    """Find occurrences without a task, with several, or at a wrong time, and tasks that overlap."""
    times = Counter(each.at_us for each in some.found)
    due = range(some.first_us, some.last_us + 1, some.interval_us)
    name = f"schedule {some.name!r}"
    for at_us, count in sorted(times.items()):
        if count > 1:
            yield Violation("I9", "repeated", f"{name}: {count} tasks for {at_us}")
        if at_us < some.first_us or (at_us - some.first_us) % some.interval_us:
            yield Violation("I9", "unexpected", f"{name}: no occurrence is at {at_us}")
    for at_us in due:
        if at_us not in times and not _may_be_left_out(some, at_us):
            yield Violation("I9", "left out", f"{name}: no task for {at_us}")
    if some.overlap == "skip":
        yield from _overlaps(some.found, name)


def _may_be_left_out(some: Occurrences, at_us: int) -> bool:
    before = [each for each in some.found if each.at_us < at_us]
    after = next((each for each in some.found if each.at_us > at_us), None)
    if some.overlap == "skip" and before:
        ended_us = before[-1].ended_us
        if ended_us is None or ended_us >= at_us:
            return True
    # After an outage, the last occurrence that has passed gets its task, and the earlier ones none.
    return some.missed == "latest" and after is not None and after.at_us <= after.made_us


def _overlaps(found: list[Occurrence], name: str) -> Iterator[Violation]:
    """Find tasks that were made before the task before them had ended."""
    by_creation = sorted(found, key=lambda each: each.made_us)
    for before, after in pairwise(by_creation):
        if before.ended_us is None or before.ended_us > after.made_us:
            yield Violation(
                "I9", "overlapped", f"{name}: {after.at_us} was made while {before.at_us} waited"
            )
