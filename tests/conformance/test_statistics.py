"""Counts of runs, on every database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

import delaytasks as e
from delaytasks import Cancel, Fail, Retry, Snooze, Status
from tests.world import MainProcess, MakeWorld, World
from tests.world.recording import refusing
from tests.world.run_counts import Counts

OUTCOMES = "done failed retried snoozed cancelled expired given_back lease_lost worker_lost".split()


@pytest.fixture
def main(world: World) -> Iterator[MainProcess]:
    made = MainProcess(world)
    yield made
    made.close()


# A process counts every run once, by tag and outcome, with its lateness and duration


def totals(world: World) -> dict[str, Any]:
    return dict(world.delays.statistics.totals(since="2h"))


def outcomes(world: World, tag: str = "note") -> dict[str, int]:
    total = totals(world)[tag]
    return {name: getattr(total, name) for name in OUTCOMES if getattr(total, name)}


def test_each_outcome_is_counted(main: MainProcess) -> None:
    world, returns = main.world, {"fail": Fail("no"), "cancel": Cancel("no")}
    returns |= {"snooze": Snooze("1h"), "retry": Retry("1h")}

    def end(body: str) -> object:
        if body == "raise":
            raise ValueError("broken")
        return returns.get(body)

    world.delays.processor("end")(end)
    world.delays.processor("retried", retries="1h")(end)
    tasks = [world.schedule("end", body) for body in ("ok", "ok", "raise", *returns)]
    rest = [world.schedule("retried", "raise"), world.schedule(), world.schedule("unknown")]
    main.write_counts(world.run(*tasks, *rest))
    found = totals(world)
    assert {tag: outcomes(world, tag) for tag in found} == {
        "end": {"done": 2, "failed": 2, "cancelled": 1, "snoozed": 1, "retried": 1},
        "retried": {"retried": 1},
        "note": {"done": 1},
        "unknown": {"given_back": 1},
    }
    started = {tag: one.started for tag, one in found.items()}
    assert started == {"end": 7, "retried": 1, "note": 1, "unknown": 0}
    assert all(sum(one.duration) == one.started for one in found.values())


def test_the_lateness_is_that_of_the_due_time(main: MainProcess) -> None:
    world = main.world
    world.delays.processor("brief", max_late="2s")(lambda body: None)
    late, prompt, expired = [world.schedule(tag) for tag in ("note", "note", "brief")]
    for task, name in ((late, "due_time"), (expired, "expected_time")):  # one was deferred
        world.change(task, **{name: task.expected_time - timedelta(seconds=100)})
    main.write_counts(world.run(late, prompt, expired))
    found = totals(world)
    assert 100 <= found["note"].lateness_max_s <= found["note"].lateness_s < 200
    assert 60 < found["note"].lateness_quantile(0.9) < 200
    assert outcomes(world, "brief") == {"expired": 1}
    assert (found["note"].started, found["brief"].started) == (2, 0)


def test_a_lost_lease_and_a_task_that_its_workers_lost_are_counted(main: MainProcess) -> None:
    world, task, writer = main.world, main.world.schedule(), main.runtime.statistics
    assert writer is not None
    world.before_settle = lambda settlements: world.change(task, version=99)
    main.write_counts(world.run(task))
    assert outcomes(world) == {"lease_lost": 1}
    assert world.delays.statistics.failures() == []
    writer("task.worker_lost", {"id": 5, "tag": "a", "error": "gave up: it died 5 times"})
    writer("task.failed", {"id": 5, "tag": "a", "error": "counted by the process"})
    main.write_counts()
    assert outcomes(world, "a") == {"worker_lost": 1}
    [group] = world.delays.statistics.failures()
    assert (group.pattern, group.runs) == ("gave up: it died * times*", 1)


# The filter `error=`, with which the tasks of a failure group are found and moved


#: Patterns, and the only texts that match.
MATCHES = {"100%*": "100% full", "a_b*": "a_b", "wow! *": "wow! such error"}
MATCHES |= {"back\\slash*": "back\\slash", "first*second": "first\nline\nsecond"}
OTHERS = ["100 full", "axb", "wow% such error", "backslash", "first only", "second"]


def test_patterns_match_whole_texts_with_stars(world: World) -> None:
    for text in [*MATCHES.values(), *OTHERS]:
        world.change(world.put(Status.FAILED), error_stack=text)
    for pattern, text in MATCHES.items():
        assert [task.error for task in world.delays.find(error=pattern, limit=100)] == [text]


def test_the_pattern_of_a_real_failure_finds_its_task(main: MainProcess) -> None:
    world, delays = main.world, main.world.delays

    def charge(body: Any) -> None:
        raise ValueError(f"order {body} of 'customer_{body}' costs 100% {body}")

    world.delays.processor("charge", retries="1h")(charge)
    world.delays.processor("charge.once")(charge)
    waits, fails = world.schedule("charge", 1), world.schedule("charge.once", 2)
    other = world.schedule("charge.once", 3)
    main.write_counts(world.run(waits, fails))
    patterns = {one.tag: one.pattern for one in delays.statistics.failures()}
    assert patterns["charge"] == patterns["charge.once"]
    assert [one.id for one in delays.find(tag="charge", error=patterns["charge"])] == [waits.id]
    found = delays.find(tag="charge.once", error=patterns["charge"])
    assert [one.id for one in found] == [fails.id]
    assert delays.bulk.cancel(tag="charge", error=patterns["charge"]).changed == 1
    assert world.read(other).status is Status.NOT_COMPLETE


# `delays.statistics` on each database: series, totals and failures


NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
SECOND, MINUTE, HOUR, DAY = (timedelta(seconds=n) for n in (1, 60, 3600, 86_400))

Write = Callable[..., None]


@pytest.fixture
def write(world: World) -> Write:
    """Write one run for each lateness."""

    def one(at: datetime, tag: str, *latenesses_s: float) -> None:
        Counts(world).add_runs(at, tag, *latenesses_s).write()

    return one


def test_a_series_has_every_step_and_adds_the_tags_up(world: World, write: Write) -> None:
    delays = world.delays
    for second in (0, 20):  # one row has what ended in a minute
        write(NOON + second * SECOND, "a", 0.1)
    write(NOON + 4 * MINUTE, "b", 0.1)
    for minute in (-1, 12, 15):
        write(NOON + minute * MINUTE, "a", 0.1)
    # The start is rounded, and the end is excluded.
    since, until = NOON + 30 * SECOND, NOON + 15 * MINUTE
    points = delays.statistics.series(since=since, until=until, step="5m")
    counts = [(one.start, one.total.done) for one in points]
    assert counts == [(NOON, 3), (NOON + 5 * MINUTE, 0), (NOON + 10 * MINUTE, 1)]
    first = points[0].total
    assert (sum(first.lateness), sum(first.duration), first.lateness_max_s) == (3, 3, 0.1)
    only = delays.statistics.series(since=NOON, until=NOON + 5 * MINUTE, step="5m", tags=["b"])
    assert [one.total.done for one in only] == [1]
    assert delays.statistics.totals(since=since, until=until)["a"].done == 3


# The tables of statistics: adding counts, and purging them


def test_workers_that_write_simultaneously_lose_nothing(world: World) -> None:
    def work(number: int) -> None:
        mine = Counts(world).add_failures(NOON, "broken*", task_id=number)
        for tag in ("a", "b", f"only-{number}"):
            mine.add_runs(NOON, tag, 0.1)
        for _ in range(20):
            mine.write()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    found = world.delays.statistics.totals(since=NOON, until=NOON + MINUTE)
    assert (found["a"].started, found["b"].started, found["only-3"].started) == (80, 80, 20)
    [group] = world.delays.statistics.failures()
    assert (group.runs, group.hours) == (80, {NOON: 80})


def test_a_sweep_purges_what_is_older_than_two_days_unless_it_is_off(make_world: MakeWorld) -> None:
    def left_after(world: World) -> tuple[int, list[str]]:
        now, statistics = world.now(), world.delays.statistics
        for name, age in (("old*", 2 * HOUR), ("new*", -2 * HOUR)):
            at = now - 2 * DAY - age
            Counts(world).add_runs(at, "runs", 0.1).add_failures(at, name).write()
        world.sweep_later()
        started = statistics.totals(since=now - 3 * DAY)["runs"].started
        return started, sorted(group.pattern for group in statistics.failures())

    off, on = make_world(statistics=False), make_world()
    assert left_after(off) == (2, ["new*", "old*"])
    assert left_after(on) == (2, ["new*"])


# A write that fails is given up, since it may have been committed


def test_counts_of_a_failed_write_are_lost_and_none_are_written_twice(main: MainProcess) -> None:
    world = main.world

    def done() -> int:
        return sum(one.done for one in totals(world).values())

    refused = refusing(world.delays, e.StoreUnavailableError("down"), "yb_delay_statistics")
    with refused, pytest.raises(e.StoreUnavailableError):
        main.write_counts(world.run(world.schedule()))
    main.write_counts(world.run(world.schedule()))
    assert done() == 1
    report = world.run(world.schedule())
    with world.losing_answers(), pytest.raises(e.StoreError):
        main.write_counts(report)
    main.write_counts()
    assert done() == 2
