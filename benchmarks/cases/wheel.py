"""The timing wheel in one process, compared with other timer structures."""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable

from benchmarks import timer_structures
from benchmarks.figures import Target
from benchmarks.machine import usage
from benchmarks.stage import CaseContext
from benchmarks.timer_structures import Holder
from delaytasks.worker.wheel import TimingWheel

#: The due tick of the first entry; the last is due SPREAD ticks later. All earlier ticks are empty.
FAR, SPREAD = 1_000_000, 10_000
#: The duration of the tick measurement, and the ticks per block.
TICKS_FOR_S, BLOCK = 0.2, 100
#: The numbers of entries.
HELD = (1_000, 10_000, 100_000, 1_000_000)
MANY = 100_000
#: Operations that cost as much as all entries together are measured only a few times.
FEW = 20
#: More threads than this overload the machine.
THREADS = 2000

Name = tuple[int, int]
#: The name of each measure, its unit and its target.
_MEASURES = [
    ("add", "/s", Target("value", least=500_000)),
    ("move", "/s", None),
    ("cancel", "/s", Target("value", least=500_000)),
    ("cancel in random order", "/s", None),
    ("expire", "/s", None),
    ("memory", "bytes an entry", None),
    ("memory, few per tick", "bytes an entry", None),
]
_RIVALS: dict[str, Callable[[], Holder]] = {
    "heapq": timer_structures.Heap,
    "sched": timer_structures.Sched,
    "map, scanned": timer_structures.Scan,
    "asyncio call_at": timer_structures.LoopTimers,
}


def run(stage: CaseContext) -> None:
    ticks = {held: _tick_us(_filled(held)) for held in HELD}
    for held, cost in ticks.items():
        target = Target("ratio", most=2) if held == max(HELD) else None
        stage.figure("wheel", f"tick, {held:,} held", "µs", target, against="1,000 held:").add(
            cost, ticks[1000]
        )
    ours = {held: _work(TimingWheel, held) for held in (MANY, max(HELD))}
    for held, found in ours.items():
        _say(stage, "wheel", held, found)
        for measure, unit, target in _MEASURES:
            stage.figure("wheel", f"{measure}, {held:,} held", unit, target).add(found[measure])
    for name, make in _RIVALS.items():
        theirs = _work(make, MANY)
        _say(stage, name, MANY, theirs)
        for measure, unit, _ in _MEASURES:
            figure = stage.figure(
                "wheel", f"{measure}, compared with {name}", unit, against=f"{name}:"
            )
            figure.add(ours[MANY][measure], theirs[measure])
        figure = stage.figure("wheel", f"tick, compared with {name}", "µs", against=f"{name}:")
        figure.add(ticks[MANY], theirs["tick"])
    _threads(stage)


def _say(stage: CaseContext, name: str, held: int, found: dict[str, float]) -> None:
    values = ", ".join(f"{measure} {found[measure]:,.0f} {unit}" for measure, unit, _ in _MEASURES)
    stage.say(f"wheel: {name} with {held:,}: {values}, tick {found['tick']:,.2f} µs")


def _work(make: Callable[[], Holder], count: int) -> dict[str, float]:
    """Return rates per second, microseconds of an empty tick, and bytes per entry."""
    owner, (names, ticks) = make(), _entries(count)
    found = {"add": _rate(lambda: _add(owner, names, ticks), count), "tick": _tick_us(owner)}
    # Entries are moved in the order of their arrival, as timeouts are extended, and in random
    # order, which uses the caches less well.
    some = FEW if isinstance(owner, timer_structures.Sched) else count // 4
    first, any_others = names[:some], random.Random(2).sample(names[some:], some)
    found["move"] = _rate(lambda: _add(owner, first, reversed(ticks)), some)
    found["cancel"] = _rate(lambda: _cancel(owner, first), some)
    found["cancel in random order"] = _rate(lambda: _cancel(owner, any_others), some)
    found["expire"] = _expired_per_s(owner)
    found["memory"] = _bytes_each(make, count, SPREAD)
    found["memory, few per tick"] = _bytes_each(make, count, count)
    return found


def _entries(count: int, spread: int = SPREAD) -> tuple[list[Name], list[int]]:
    """Return names as the worker uses them: id and version."""
    chance = random.Random(1)
    return [(number << 22, 0) for number in range(count)], [
        FAR + chance.randrange(spread) for _ in range(count)
    ]


def _filled(count: int) -> TimingWheel[Name]:
    wheel: TimingWheel[Name] = TimingWheel()
    _add(wheel, *_entries(count))
    return wheel


def _add(owner: Holder, names: Iterable[Name], ticks: Iterable[int]) -> None:
    for name, tick in zip(names, ticks, strict=False):
        owner.add(name, tick, name)


def _cancel(owner: Holder, names: Iterable[Name]) -> None:
    for name in names:
        owner.cancel(name)


def _rate(work: Callable[[], None], count: int) -> float:
    """Return the rate by CPU time, which other processes do not distort, since all the work is
    computing.
    """
    before = time.process_time()
    work()
    return count / (time.process_time() - before)


def _tick_us(owner: Holder) -> float:
    blocks: list[float] = []
    tick, ends = 0, time.process_time() + TICKS_FOR_S
    while tick < FAR - BLOCK and (len(blocks) < 5 or time.process_time() < ends):
        before = time.process_time()
        for _ in range(BLOCK):
            tick += 1
            owner.advance(tick)
        blocks.append((time.process_time() - before) / BLOCK)
    owner.advance(FAR - 1)
    return statistics.median(blocks) * 1e6


def _expired_per_s(owner: Holder) -> float:
    """Advance tick by tick."""
    steps = FEW if isinstance(owner, timer_structures.Scan) else SPREAD
    expired, before = 0, time.process_time()
    for tick in range(FAR, FAR + steps):
        expired += len(owner.advance(tick))
    return expired / (time.process_time() - before)


def _bytes_each(make: Callable[[], Holder], count: int, spread: int) -> float:
    """Return the memory of an entry without its name, which exists for the task anyway."""
    names, ticks = _entries(count, spread)
    gc.collect()
    tracemalloc.start()
    try:
        owner = make()
        before = tracemalloc.get_traced_memory()[0]
        _add(owner, names, ticks)
        return (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()


def _threads(stage: CaseContext) -> None:
    count = stage.size(THREADS, THREADS // 10)
    timers, before = timer_structures.ThreadTimers(), usage(os.getpid())

    def add() -> None:
        for number in range(count):
            timers.add(number, 3600)

    def cancel() -> None:
        for number in range(count):
            timers.cancel(number)

    what = f"threading.Timer, {count:,} threads"
    stage.figure("wheel", f"{what}: add", "/s").add(_rate(add, count))
    after = usage(os.getpid())
    if before is not None and after is not None:
        memory = stage.figure("wheel", f"{what}: memory", "bytes an entry")
        memory.add((after.rss_bytes - before.rss_bytes) / count)
    stage.figure("wheel", f"{what}: cancel", "/s").add(_rate(cancel, count))
