"""Numbers of tasks that become due, as they were counted, estimated or computed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import nlargest
from random import Random
from typing import NamedTuple

MINUTE_S = 60
#: A second is a peak if a sample has at least this number of tasks of it, and this many times as
#: many as the average second of its minute.
PEAK_ROWS, PEAK_TIMES = 3, 3
#: Tasks that are spread over a minute become due in steps of this many seconds.
SPREAD_STEP_S = 20
#: The number of parts of a queue and priority whose tags are read.
PARTS = 100


class DueCount(NamedTuple):
    """Tasks of one queue and tag that become due in the same second."""

    queue: str
    tag: str
    #: Seconds since 1970.
    second: int
    #: The number of tasks. An estimate may be a fraction.
    tasks: float
    #: The tasks become due evenly in this time from `second` on; 0 if they become due together.
    length_s: float = 0.0


class DueCounts(NamedTuple):
    """The tasks of one source."""

    counts: Sequence[DueCount] = ()
    #: Whether the numbers are estimates.
    is_estimate: bool = False


def scaled(sample: Iterable[DueCount], weight: float) -> list[DueCount]:
    """Return the estimate that a random sample means, if each of its tasks stands for `weight`.

    One task of the sample does not mean that `weight` tasks are due in its second. Tasks are
    therefore spread over their minute, unless the sample has a peak there.
    """
    minutes: defaultdict[tuple[str, str, int], list[DueCount]] = defaultdict(list)
    for each in sample:
        minutes[each.queue, each.tag, each.second // MINUTE_S].append(each)
    found: list[DueCount] = []
    for (queue, tag, minute), counts in minutes.items():
        mean = sum(each.tasks for each in counts) / MINUTE_S
        even = 0.0
        for each in counts:
            if each.tasks >= PEAK_ROWS and each.tasks > PEAK_TIMES * mean:
                found.append(each._replace(tasks=each.tasks * weight))
            else:
                even += each.tasks * weight
        found += spread_over(queue, tag, minute * MINUTE_S, MINUTE_S, even)
    return found


def largest_peaks(
    counts: Iterable[DueCount], most: int, after: int
) -> list[tuple[tuple[str, int], float]]:
    """Return the queues and seconds after `after` with the most tasks, and their numbers."""
    seconds: defaultdict[tuple[str, int], float] = defaultdict(float)
    for each in counts:
        if each.second > after:
            seconds[each.queue, each.second] += each.tasks
    return nlargest(most, seconds.items(), key=lambda item: item[1])


def parts_of(seconds: Mapping[int, int]) -> Iterator[dict[int, int]]:
    """Divide the seconds into parts with about as many tasks; a peak is a part of its own."""
    most = sum(seconds.values()) / PARTS
    part: dict[int, int] = {}
    size = 0
    for second, tasks in sorted(seconds.items()):
        if part and size + tasks > most:
            yield part
            part, size = {}, 0
        part[second] = tasks
        size += tasks
    if part:
        yield part


def tagged(queue: str, part: Mapping[int, int], tags: Sequence[str]) -> Iterator[DueCount]:
    """Yield the tasks of a part, whose tags are those of some of its tasks.

    In a part of many seconds, all tasks of a minute get the same tag, which is chosen at random.
    Otherwise the numbers of each minute and tag would be as many as the tasks.
    """
    if len(part) == 1:
        [(second, tasks)] = part.items()
        for tag, count in Counter(tags).items():
            yield DueCount(queue, tag, second, tasks * count / len(tags))
        return
    random = Random(min(part))
    minutes: Counter[int] = Counter()
    for second, tasks in part.items():
        minutes[second // MINUTE_S] += tasks
    for minute, tasks in minutes.items():
        if tags:
            tag = random.choice(tags)
            yield from spread_over(queue, tag, minute * MINUTE_S, MINUTE_S, tasks)


def spread_over(
    queue: str, tag: str, second: int, length_s: int, tasks: float
) -> Iterable[DueCount]:
    """Yield `tasks` in equal parts that become due from `second` on, for `length_s` seconds."""
    if tasks > 0:
        steps = range(second, second + length_s, SPREAD_STEP_S)
        for step in steps:
            yield DueCount(queue, tag, step, tasks / len(steps), length_s / len(steps))
