"""Counts of runs, on every database."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy.exc import NoResultFound

from delaytasks import (
    Cancel,
    DelayedTask,
    DelayTasks,
    Fail,
    Retry,
    Snooze,
    Status,
    StoreError,
    StoreUnavailableError,
)
from delaytasks.core.events import Events
from delaytasks.core.run_counts import (
    LATENESS_BOUNDS_S,
    FailureCount,
    RunCounts,
    RunStatistics,
    bucket_of,
)
from delaytasks.execution.runner import Report
from delaytasks.execution.settlement import MAX_FAILURE_GROUPS
from delaytasks.runtime import runtime_of
from delaytasks.statistics import statistics_table
from delaytasks.statistics.reading import StepRange, count_rows, run_counts
from delaytasks.statistics.statistics_table import (
    WRITE_S,
    StatisticsTable,
    StatisticsWriter,
    Unwritten,
    WorkerCounts,
)
from delaytasks.storage.store import Store
from tests.conformance.bulk_tasks import put
from tests.refusals import invalid
from tests.world import MakeWorld, World

# A process counts every run once, by tag and outcome, with its lateness and duration


def counts_of(report: Report) -> Mapping[str, RunCounts]:
    return {tag: RunCounts.of(stored) for tag, stored in report.statistics.tags}


def outcomes_of(report: Report, tag: str) -> dict[str, int]:
    return {name: count for name, count in counts_of(report)[tag].by_outcome().items() if count}


def test_each_outcome_is_counted(world: World) -> None:
    def end(body: Any) -> object:
        if body == "raise":
            raise ValueError("broken")
        outcomes = {"fail": Fail("no"), "cancel": Cancel("no"), "snooze": Snooze("1h")}
        return {**outcomes, "retry": Retry("1h")}.get(body)

    world.delays.processor("end")(end)
    world.delays.processor("retried", retries="1h")(end)
    bodies = ["ok", "ok", "raise", "fail", "cancel", "snooze", "retry"]
    tasks = [world.schedule("end", body) for body in bodies]
    rest = [world.schedule("retried", "raise"), world.schedule(), world.schedule("unknown")]
    report = world.run(*tasks, *rest)
    assert outcomes_of(report, "end") == {
        "done": 2, "failed": 2, "cancelled": 1, "snoozed": 1, "retried": 1,
    }  # fmt: skip
    assert outcomes_of(report, "retried") == {"retried": 1}
    assert outcomes_of(report, "note") == {"done": 1}
    assert outcomes_of(report, "unknown") == {"given_back": 1}
    found = counts_of(report)
    started = {tag: one.started for tag, one in found.items()}
    assert started == {"end": 7, "retried": 1, "note": 1, "unknown": 0}
    assert (found["note"].on_time, found["note"].late) == (0, 0), "the tag has no promise"
    assert all(sum(one.duration) == one.started for one in found.values())


def test_a_report_has_only_what_was_counted_since_the_last_one(world: World) -> None:
    assert outcomes_of(world.run(world.schedule()), "note") == {"done": 1}
    assert outcomes_of(world.run(world.schedule()), "note") == {"done": 1}
    assert world.run().statistics.tags == ()


def test_a_drain_counts_too(world: World) -> None:
    for _ in range(5):
        world.schedule()
    assert outcomes_of(world.drain(), "note") == {"done": 5}


def test_tasks_of_a_batch_and_concurrent_tasks_are_each_counted_once(world: World) -> None:
    world.delays.processor("batch", batch=10)(lambda tasks: None)
    world.delays.processor("slots", in_flight=8)(lambda body: None)
    report = world.run(*[world.schedule(tag) for tag in ("batch", "slots") for _ in range(54)])
    for tag in ("batch", "slots"):
        assert outcomes_of(report, tag) == {"done": 54}
        assert counts_of(report)[tag].started == 54


def test_the_lateness_is_that_of_the_due_time_and_decides_about_on_time(world: World) -> None:
    world.delays.processor("prompt", on_time="5s")(lambda body: None)
    late, prompt = world.schedule("prompt"), world.schedule("prompt")
    world.change(late, expected_time=late.expected_time - timedelta(seconds=100))
    counts = counts_of(world.run(late, prompt))["prompt"]
    assert (counts.on_time, counts.late) == (1, 1)
    assert counts.lateness[bucket_of(105, LATENESS_BOUNDS_S)] == 1
    assert 100 <= counts.lateness_s < 200


def test_an_expired_task_is_late_and_has_no_run(world: World) -> None:
    world.delays.processor("brief", on_time="1s", max_late="2s")(lambda body: None)
    task = world.schedule("brief")
    world.change(task, expected_time=task.expected_time - timedelta(seconds=100))
    report = world.run(task)
    assert outcomes_of(report, "brief") == {"expired": 1}
    counts = counts_of(report)["brief"]
    assert (counts.on_time, counts.late, counts.started) == (0, 1, 0)


def test_a_settlement_that_changes_no_row_is_a_lost_lease(world: World) -> None:
    task = world.schedule()
    world.before_settle = lambda settlements: world.change(task, version=99)
    report = world.run(task)
    assert outcomes_of(report, "note") == {"lease_lost": 1}
    assert report.statistics.failures == ()


def test_failures_are_grouped_by_tag_and_pattern(world: World) -> None:
    def fail(body: Any) -> None:
        raise KeyError(body)

    for tag in ("a", "b"):
        world.delays.processor(tag)(fail)
    tasks = [world.schedule(tag, body) for tag in "ab" for body in (1, 2, 3)]
    failures = world.run(*tasks).statistics.failures
    assert {(one.tag, one.pattern, one.runs) for one in failures} == {
        (tag, "* in fail\n*KeyError: *", 3) for tag in "ab"
    }
    assert {one.task_id for one in failures} <= {task.id for task in tasks}
    assert all("KeyError" in one.error for one in failures)


def test_the_groups_of_one_report_are_bounded(world: World) -> None:
    def fail(body: str) -> None:
        raise RuntimeError(body)

    world.delays.processor("various")(fail)
    letters = [chr(ord("a") + number) * 3 for number in range(26)]
    report = world.run(*[world.schedule("various", letter) for letter in letters])
    assert len(report.statistics.failures) == MAX_FAILURE_GROUPS
    assert outcomes_of(report, "various") == {"failed": 26}


def test_several_threads_lose_no_count(world: World) -> None:
    tasks = [world.schedule() for _ in range(60)]
    total = RunCounts()
    with ThreadPoolExecutor(3) as threads:
        reports = list(threads.map(world.run, tasks))
    for report in reports:
        for _, stored in report.statistics.tags:
            total.add_stored(stored)
    assert (total.started, total.outcome("done")) == (60, 60)


def test_nothing_is_counted_if_the_setting_is_off(make_world: MakeWorld) -> None:
    world = make_world(statistics=False)
    assert world.run(world.schedule()).statistics.tags == ()


# The filter `error=`, with which the tasks of a failure group are found and moved


def failed(store: Store, delays: DelayTasks, error: str, tag: str = "a") -> DelayedTask:
    task = delays.schedule_delay(tag, None, "1h")
    put(store, task, status=int(Status.FAILED), error_stack=error)
    return task


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("*timeout*", ["a timeout of 5 s", "timeout"]),
        ("*Timeout", ["Timeout", "read Timeout"]),
        ("100%*", ["100% full"]),
        ("a_b*", ["a_b"]),
        ("wow! *", ["wow! such error"]),
        ("back\\slash*", ["back\\slash"]),
        ("first*second", ["first\nline\nsecond"]),
    ],
)
def test_a_pattern_matches_the_whole_text_and_only_its_star_is_special(
    store: Store, delays: DelayTasks, pattern: str, matches: list[str]
) -> None:
    texts = (
        "a timeout of 5 s|timeout|Timeout|read Timeout|100% full|100 full|a_b|axb|wow! such error|"
        "wow% such error|back\\slash|backslash|first\nline\nsecond|first only"
    ).split("|")
    by_id = {failed(store, delays, text).id: text for text in texts}
    found = delays.find(tag="a", status="FAILED", error=pattern, limit=100)
    ours = sorted(by_id[task.id] for task in found)
    if store.database.url.get_backend_name() == "sqlite":  # its LIKE ignores case
        assert set(matches) <= set(ours)
        assert {text.lower() for text in ours} - {"timeout", "read timeout"} <= {*matches}
    else:
        assert ours == sorted(matches)


def test_the_pattern_of_a_real_failure_finds_its_task(world: World, delays: DelayTasks) -> None:
    def charge(body: Any) -> None:
        raise ValueError(f"order {body} of 'customer_{body}' costs 100% {body}")

    world.delays.processor("charge", retries="1h")(charge)
    world.delays.processor("charge.once")(charge)
    waits, fails = world.schedule("charge", 1), world.schedule("charge.once", 2)
    other = world.schedule("charge.once", 3)
    report = world.run(waits, fails)
    patterns = {one.tag: one.pattern for one in report.statistics.failures}
    assert patterns["charge"] == patterns["charge.once"]
    assert [one.id for one in delays.find(tag="charge", error=patterns["charge"])] == [waits.id]
    found = delays.find(tag="charge.once", error=patterns["charge"])
    assert [one.id for one in found] == [fails.id]
    assert delays.bulk.cancel(tag="charge", error=patterns["charge"]).changed == 1
    assert world.read(other).status is Status.NOT_COMPLETE


@pytest.mark.parametrize("pattern", ["", "*", "**", 5, "x" * 1001, "a\0b"])
def test_a_pattern_that_selects_nothing_in_particular_is_refused(
    delays: DelayTasks, pattern: Any
) -> None:
    with invalid("error", match="error"):
        delays.find(error=pattern)


# `delays.statistics` on each database: series, totals, on-time shares and failures


NOON = datetime(2026, 3, 1, 12, tzinfo=timezone.utc)
NOON_2030 = NOON.replace(year=2030)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


class Table(StatisticsTable):
    """The tables, with the transactions in which a worker writes to them."""

    def put(self, unwritten: Unwritten, now: datetime = NOON_2030) -> None:
        self._db.transaction(lambda connection: self.add(connection, unwritten, now))

    def minutes(self) -> dict[tuple[datetime, str], RunCounts]:
        rows = self.read(NOON_2030 - 4000 * DAY, NOON_2030 + 1000 * DAY, None)
        return {(row.start, row.tag): row.counts for row in rows}

    def groups(self) -> list[Any]:
        return list(self.failure_groups(None, None, 10))


@pytest.fixture
def table(store: Store) -> Table:
    return Table(store.database, store.schema)


def write(table: Table, at: datetime, tag: str, *latenesses: float) -> None:
    counts = RunCounts()
    counts.add_outcome("done", len(latenesses))
    for lateness_s in latenesses:
        counts.add_run(lateness_s, 0.2, 5.0 if tag == "prompt" else None)
    unwritten = Unwritten()
    unwritten.add_run(int(at.timestamp()) // 60, tag, counts)
    table.put(unwritten, at)


def test_a_series_has_every_step_and_adds_the_tags_up(delays: DelayTasks, table: Table) -> None:
    write(table, NOON, "a", 0.1, 0.1)
    write(table, NOON + 4 * MINUTE, "b", 0.1)
    write(table, NOON + 12 * MINUTE, "a", 0.1)
    points = delays.statistics.series(since=NOON, until=NOON + 15 * MINUTE, step="5m")
    assert [(one.start, one.total.done) for one in points] == [
        (NOON, 3),
        (NOON + 5 * MINUTE, 0),
        (NOON + 10 * MINUTE, 1),
    ]
    assert {tag: one.started for tag, one in points[0].tags.items()} == {"a": 2, "b": 1}
    only = delays.statistics.series(since=NOON, until=NOON + 5 * MINUTE, step="5m", tags=["b"])
    assert [one.total.done for one in only] == [1]


def test_the_rows_of_a_range_are_counted_up_to_a_limit(store: Store, table: Table) -> None:
    for minute in range(4):
        for tag in "abc":
            write(table, NOON - minute * MINUTE, tag, 0.1)
    since, until = NOON - 2 * MINUTE, NOON + HOUR
    assert count_rows(store, since, until, 100) == len(list(table.read(since, until, None))) == 9
    assert count_rows(store, since, until, 5) == 5


def test_the_end_of_a_range_is_exclusive_and_its_beginning_is_rounded_down(
    delays: DelayTasks, table: Table
) -> None:
    for offset in (-1, 0, 9, 10):
        write(table, NOON + offset * MINUTE, "a", 0.1)
    since = NOON + timedelta(seconds=30)
    points = delays.statistics.series(since=since, until=NOON + 10 * MINUTE, step="10m")
    assert [(one.start, one.total.done) for one in points] == [(NOON, 2)]
    assert delays.statistics.totals(since=since, until=NOON + 10 * MINUTE)["a"].done == 2


def test_the_totals_of_a_range_need_one_count_for_each_tag(store: Store, table: Table) -> None:
    for minute in (0, 5, 59):
        write(table, NOON + minute * MINUTE, "a", 0.1)
        write(table, NOON + minute * MINUTE, "b", 0.1)
    until = NOON + 50 * MINUTE
    steps = StepRange.of(until, NOON, until, "1m", is_series=False)
    [by_tag] = run_counts(store, steps, None).values()
    assert {tag: counts.started for tag, counts in by_tag.items()} == {"a": 2, "b": 2}


def test_a_range_is_the_same_in_every_time_zone(delays: DelayTasks, table: Table) -> None:
    write(table, NOON, "a", 0.1)
    east = timezone(timedelta(hours=9))
    points = delays.statistics.series(
        since=NOON.astimezone(east), until=(NOON + HOUR).astimezone(east), step="1h"
    )
    assert [(one.start, one.total.done) for one in points] == [(NOON, 1)]
    assert points[0].start.tzinfo is timezone.utc


def test_a_duration_is_a_range_before_now(delays: DelayTasks, store: Store, table: Table) -> None:
    now = store.tasks.now()
    write(table, now - 10 * MINUTE, "a", 0.1)
    write(table, now - 2 * HOUR, "a", 0.1)
    assert delays.statistics.totals()["a"].done == 1
    assert delays.statistics.totals(since="3h")["a"].done == 2
    assert sum(one.total.done for one in delays.statistics.series(since="3h")) == 2


def test_quantiles_come_from_the_histograms_of_the_range(delays: DelayTasks, table: Table) -> None:
    write(table, NOON, "a", *[0.02] * 98)
    write(table, NOON + MINUTE, "a", 50, 50)
    total = delays.statistics.totals(since=NOON, until=NOON + HOUR)["a"]
    assert 0.01 <= (total.lateness_quantile(0.5) or 0) <= 0.025
    assert 30 <= (total.lateness_quantile(0.99) or 0) <= 60
    assert 0.1 <= (total.duration_quantile(0.5) or 0) <= 0.25
    assert total.lateness_s == pytest.approx(98 * 0.02 + 100)
    assert total.on_time_share is None


def test_the_share_on_time_is_exact_though_the_bounds_of_the_histogram_are_not(
    delays: DelayTasks, table: Table
) -> None:
    delays.processor("prompt", on_time="5s")(lambda body: None)
    write(table, NOON, "prompt", *[4.999] * 997, 5.001, 5.002, 9)
    write(table, NOON, "other", 1)
    span: dict[str, Any] = {"since": NOON, "until": NOON + HOUR}
    [one] = delays.statistics.on_time(**span, target=0.99)
    assert (one.tag, one.promised_s, one.on_time, one.late) == ("prompt", 5, 997, 3)
    assert one.share == 0.997
    with invalid("target", match="target"):
        delays.statistics.on_time(target=1)


def test_failure_groups_are_read_and_select_their_tasks(delays: DelayTasks, table: Table) -> None:
    group = Unwritten()
    hour = int(NOON.timestamp()) // 3600
    pattern = "* in charge\n*ValueError: order * not found*"
    group.add_failure(hour, FailureCount("a", pattern, 3, 17, "the error"))
    table.put(group, NOON)
    [found] = delays.statistics.failures(tag="a")
    assert (found.runs, found.task_id, found.error) == (3, 17, "the error")
    assert found.hours == {NOON: 3}
    assert found.first_at == found.last_at == NOON
    assert found.filters == {"tag": "a", "error": pattern}
    assert delays.statistics.failures(tag="b") == []
    assert delays.statistics.failures(since=NOON + MINUTE) == []


@pytest.mark.parametrize(
    ("options", "argument", "reason"),
    [
        ({"step": "90s"}, "step", "whole minutes"),
        ({"step": 0}, "step", "whole minutes"),
        ({"since": NOON, "until": NOON}, "since", "empty"),
        ({"since": "3d"}, "since", "two days"),
        ({"since": NOON - 9 * DAY, "until": NOON}, "step", "longer step"),
        ({"tags": "mail"}, "tags", "list"),
    ],
)
def test_a_wrong_range_is_refused(
    delays: DelayTasks, options: Any, argument: str, reason: str
) -> None:
    with invalid(argument, match=reason):
        delays.statistics.series(**options)


# The tables of statistics: adding counts, and purging them


def minute_of(instant: datetime) -> int:
    return int(instant.timestamp()) // 60


def runs(number: int = 1, lateness_s: float = 0.1) -> RunCounts:
    counts = RunCounts()
    counts.add_outcome("done", number)
    for _ in range(number):
        counts.add_run(lateness_s, 0.2, 5.0)
    return counts


def some(at: datetime, **tags: int) -> Unwritten:
    unwritten = Unwritten()
    for tag, number in tags.items():
        unwritten.add_run(minute_of(at), tag, runs(number))
    return unwritten


def test_counts_are_added_to_what_other_workers_have_written(table: Table) -> None:
    table.put(some(NOON_2030, a=2, b=1))
    table.put(some(NOON_2030, a=3))
    found = table.minutes()
    assert {key: one.started for key, one in found.items()} == {
        (NOON_2030, "a"): 5,
        (NOON_2030, "b"): 1,
    }
    assert found[NOON_2030, "a"].outcome("done") == found[NOON_2030, "a"].on_time == 5


def test_workers_that_write_simultaneously_lose_nothing(table: Table) -> None:
    writes = 20

    def work(number: int) -> None:
        mine = some(NOON_2030, a=1, b=1, **{f"only-{number}": 1})
        mine.add_failure(
            minute_of(NOON_2030) // 60, FailureCount("a", "broken*", 1, number, "broken")
        )
        for _ in range(writes):
            table.put(mine)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    found = table.minutes()
    assert found[NOON_2030, "a"].started == found[NOON_2030, "b"].started == 4 * writes
    assert found[NOON_2030, "only-3"].started == writes
    [group] = table.groups()
    assert group.runs == 4 * writes


def test_a_failure_group_shows_the_failure_of_the_latest_hour(table: Table) -> None:
    hour, mine = minute_of(NOON_2030) // 60, some(NOON_2030, a=3)
    mine.add_failure(hour - 1, FailureCount("a", "broken*", 1, 1, "rare and old"))
    mine.add_failure(hour, FailureCount("a", "broken*", 5, 2, "frequent and new"))
    table.put(mine)
    [group] = table.groups()
    assert (group.task_id, group.sample, group.runs) == (2, "frequent and new", 6)


def test_old_minutes_and_old_groups_are_purged(table: Table) -> None:
    later = NOON_2030 + timedelta(hours=1)
    for at, pattern in ((NOON_2030, "old*"), (later, "new*")):
        one = some(at, a=1)
        one.add_failure(1, FailureCount("a", pattern, 1, 1, "broken"))
        table.put(one, at)
    table.purge(NOON_2030 + statistics_table.COUNTS_KEPT + timedelta(minutes=1))
    assert list(table.minutes()) == [(later, "a")]
    table.purge(NOON_2030 + statistics_table.GROUPS_KEPT + timedelta(minutes=1))
    assert [group.pattern for group in table.groups()] == ["new*"]


def test_a_sweep_purges_once_an_hour_unless_the_setting_is_off(
    make_world: MakeWorld, table: Table
) -> None:
    def left_after(world: World) -> int:
        table.put(some(NOON_2030.replace(year=2020), a=1))
        world.sweep_later()
        return len(table.minutes())

    on = make_world()
    assert left_after(make_world(statistics=False)) == 1
    assert [left_after(on), left_after(on)] == [0, 1]


def test_the_number_of_groups_is_bounded(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_table, "MAX_STORED_GROUPS", 3)
    for number in range(5):
        one = Unwritten()
        one.add_failure(1, FailureCount("a", f"{number}*", 1, 1, "broken"))
        table.put(one, NOON_2030 + timedelta(minutes=number))
    table.purge(NOON_2030)
    assert [group.pattern for group in table.groups()] == ["4*", "3*", "2*"]


def test_one_write_has_the_largest_groups(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics_table, "MAX_GROUPS_PER_WRITE", 2)
    unwritten = Unwritten()
    for number in (1, 3, 2):
        unwritten.add_failure(1, FailureCount("a", f"{number}*", number, number, "broken"))
    table.put(unwritten)
    assert {group.pattern for group in table.groups()} == {"2*", "3*"}


def test_a_group_has_its_first_and_last_time_its_last_task_and_its_hours(table: Table) -> None:
    for number in range(60):
        one = Unwritten()
        one.add_failure(1000 + number, FailureCount("a", "x*", 2, number, f"x{number}"))
        table.put(one, NOON_2030 + timedelta(hours=number))
    [group] = table.failure_groups("a", NOON_2030, 10)
    assert (group.runs, group.task_id, group.sample) == (120, 59, "x59")
    assert (group.first_at, group.last_at) == (NOON_2030, NOON_2030 + timedelta(hours=59))
    hours = statistics_table.hour_counts_of(group.hours)
    assert hours == dict.fromkeys(range(1012, 1060), 2), "the last 48 hours"


def test_the_largest_times_of_a_minute_are_kept(table: Table) -> None:
    for lateness_s in (0.1, 101.0, 0.3):
        unwritten = Unwritten()
        unwritten.add_run(minute_of(NOON_2030), "a", runs(10, lateness_s))
        table.put(unwritten)
    [counts] = table.minutes().values()
    assert (counts.lateness_max_s, counts.duration_max_s) == (101.0, 0.2)


def test_values_of_another_program_are_no_error(store: Store, table: Table) -> None:
    with store.database.begin() as connection:
        written = {"start": NOON_2030, "tag": "a", "counts": "nonsense"}
        connection.execute(store.schema.statistics.insert(), [written])
    assert [one.started for one in table.minutes().values()] == [0]
    table.put(some(NOON_2030, a=1))
    assert [one.started for one in table.minutes().values()] == [1]


# A write that fails is repeated if it was certainly not committed, and otherwise given up


@pytest.fixture
def counts(store: Store, delays: DelayTasks) -> WorkerCounts:
    made = WorkerCounts(runtime_of(delays).clock, 10)
    run = RunCounts()
    run.add_outcome("done")
    made.add(RunStatistics((("a", run.as_list()),)))
    return made


def written(delays: DelayTasks) -> int:
    found = delays.statistics.totals(since="2h").get("a")
    return 0 if found is None else found.done


def writer_of(delays: DelayTasks, counts: WorkerCounts, events: Events) -> StatisticsWriter:
    runtime = runtime_of(delays)
    return StatisticsWriter(runtime.store, runtime.clock, counts, events)


def refuse(*_: Any) -> None:
    raise StoreUnavailableError("down")


def test_counts_are_written_once(delays: DelayTasks, counts: WorkerCounts) -> None:
    writer = writer_of(delays, counts, Events())
    writer.write()
    writer.write()
    assert written(delays) == 1


@pytest.mark.parametrize("error", [StoreUnavailableError("down"), NoResultFound()])
def test_counts_whose_write_failed_before_the_commit_are_written_later(
    delays: DelayTasks, counts: WorkerCounts, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    writer = writer_of(delays, counts, Events())
    with monkeypatch.context() as patch:
        patch.setattr(StatisticsTable, "add", fail)
        with pytest.raises(type(error)):
            writer.write()
    assert written(delays) == 0
    writer.write()
    assert written(delays) == 1


def test_counts_whose_commit_had_no_answer_are_not_written_twice(
    delays: DelayTasks, counts: WorkerCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_of(delays, counts, Events())
    database = runtime_of(delays).store.database
    begin: Callable[[], Any] = database.begin

    @contextmanager
    def lost() -> Any:
        with begin() as connection:
            yield connection
        refuse()

    with monkeypatch.context() as patch:
        patch.setattr(database, "begin", lost)
        with pytest.raises(StoreError):
            writer.write()
    writer.write()
    assert written(delays) == 1


def test_after_a_failed_write_the_loop_rests_as_long_as_after_another(
    delays: DelayTasks, counts: WorkerCounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Events()
    writer = writer_of(delays, counts, events)
    writer._turn()
    monkeypatch.setattr(StatisticsTable, "add", refuse)
    assert writer._turn() == WRITE_S
    assert events.counts["loop.failed"] == 1
