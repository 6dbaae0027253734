"""Rows with arbitrary column values from another program: none of them stops a worker or a
sweep, or harms other rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from delaytasks import DelayTasks, Status, TaskStateError
from tests.conformance.test_finding import all_pages
from tests.world import Entry, MakeWorld, World

pytestmark = pytest.mark.slow

MOST = 2**63 - 1
PAST = {
    "postgresql": "clock_timestamp() - interval '10 s'",
    "mysql": "UTC_TIMESTAMP(6) - INTERVAL 10 SECOND",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f000', 'now', '-10 seconds')",
}
DONE, WAITS, FAILED = Status.DONE, Status.NOT_COMPLETE, Status.FAILED
RUNNING = {"status": "3", "worker": "'w'", "lease_until": "'2000-01-01 00:00:00'"}

FAILS = {"tag": "'fails'"}


def retried(retry_delays_s: str, variation: str) -> dict[str, str]:
    """Return the headers of a task with a retry schedule of its own."""
    schedule = f'{{"retry_delays_s": {retry_delays_s}, "variation": {variation}}}'
    return {"headers": f"""'{{"retry": {schedule}}}'"""}


#: Column values as SQL that the database accepts, and the expected status of the row.
ACCEPTED: list[tuple[dict[str, str], Status]] = [
    ({"expected_time": "'0999-12-31 00:00:00'", "lapses": "1"}, DONE),
    ({"expected_time": "'9999-12-31 23:59:59'"}, WAITS),
    ({"create_time": "'9999-12-30 00:00:00'", "tag": "'nobody'"}, WAITS),
    ({"create_time": "'0001-01-03 00:00:00'", "tag": "'nobody'", "delay_time": str(MOST)}, WAITS),
    ({"delay_time": str(-MOST), "tag": "'nobody'"}, WAITS),
    ({"version": str(MOST)}, DONE),
    ({"version": str(MOST), "status": "5"}, DONE),
    (FAILS | {"version": str(MOST), "status": "5", "headers": """'{"retry": 5}'"""}, FAILED),
    ({"runs": str(2**31 - 1)}, DONE),
    ({"lapses": str(2**31 - 1)}, DONE),
    (RUNNING | {"lease_until": "'9999-01-01 00:00:00'"}, Status.RUNNING),
    (RUNNING | {"lapses": str(2**31 - 1), "version": str(MOST)}, FAILED),
    ({"message_body": "'{'", "tag": "'retries'"}, WAITS),
    ({"message_body": "'{'"}, FAILED),
    ({"message_body": f"""'"{"x" * 10_000_000}"'"""}, DONE),
    ({"message_body": "''"}, FAILED),
    ({"message_body": f"'{'[' * 100_000}'"}, FAILED),
    ({"message_body": f"'{'9' * 5_000}'"}, FAILED),
    ({"headers": "''"}, DONE),
    ({"headers": "'[]'"}, DONE),
    ({"headers": f"'{'[' * 100_000}'"}, DONE),
    ({"headers": """'{"max_late_s": NaN}'"""}, DONE),
    ({"headers": """'{"max_late_s": -5}'"""}, DONE),
    ({"headers": """'{"max_late_s": true}'"""}, DONE),
    ({"headers": f"""'{{"max_late_s": {"9" * 400}}}'"""}, DONE),
    (FAILS | {"headers": """'{"retry": 5, "max_late_s": {}}'"""}, FAILED),
    (FAILS | retried('{"a": 1}', '"x"'), FAILED),
    (FAILS | retried("[1e400, -1]", "0"), FAILED),
    (FAILS | retried(str([1] * 1001), "0"), FAILED),
    ({"task_key": "''"}, DONE),
    ({"task_key": "'of another task'"}, DONE),
    ({"limit_key": "''"}, DONE),
    ({"meta": "'[1]'"}, DONE),
    ({"meta": """'{"a": 1, "b": "c"}'"""}, DONE),
    ({"ip_address": str(-MOST), "worker": "''"}, DONE),
]
REFUSED: list[dict[str, str]] = [{"status": status} for status in ("6", "-1", "3")]
REFUSED += [{name: "-1"} for name in ("version", "runs", "lapses", "priority")]
REFUSED += [{"status": "3", "worker": "'w'"}, {"priority": "10"}, {"tag": "''"}]
REFUSED += [{"queue": "''"}, {"queue": "'../a b*'"}]


def each(column: str, *literals: str) -> list[dict[str, str]]:
    """Return a row for each of these values of a column."""
    return [{column: literal} for literal in literals]


REFUSED_BY: dict[str, list[dict[str, str]]] = {
    "postgresql": [
        *each("expected_time", "'-infinity'", "'infinity'", "'0044-03-15 BC'"),
        *each("create_time", "'20000-01-01'"),
        *each("update_time", "'infinity'"),
        *each("execution_time", "'10000-01-01'"),
    ],
    "mysql": [
        *each("expected_time", "'0000-00-00'"),
        *each("execution_time", "'2024-00-15'"),
        *each("create_time", "'2024-01-00'"),
    ],
    "sqlite": [
        *each("expected_time", "12345", "'soon'", "'2024-02-31 00:00:00'"),
        *each("update_time", "'2024-02-03T04:05:06Z'"),
        *each("create_time", "x'00ff'"),
        *each("status", "'gone'"),
        *each("version", "'x'"),
    ],
}


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world(sweep=0.001)


def put(on: Connection, table: str, values: dict[str, str]) -> None:
    names, literals = ", ".join(values), ", ".join(values.values())
    on.exec_driver_sql(f"INSERT INTO {table} ({names}) VALUES ({literals})")


@pytest.mark.parametrize("by", ["messages", "the table alone"])
def test_a_row_with_invalid_values_stops_no_process_and_no_other_row(world: World, by: str) -> None:
    delays, ran = world.delays, list[Any]()
    delays.processor("mail")(lambda body, task: ran.append(task.id))
    delays.processor("fails")(lambda body: 1 / 0)
    delays.processor("retries", retries="1h")(lambda body: 1 / 0)
    owner = delays.schedule_delay("mail", {}, 3600, key="of another task")
    good = range(1000, 1100)
    expected = insert_rows(world, good)
    for _ in range(3):
        run_all(world, expected if by == "messages" else ())
    assert not delays.events.counts["loop.failed"] + delays.events.counts["chunk.failed"]
    assert world.drain(priorities=levels(world)).claimed == 0, "nothing is tried again at once"

    # Each valid row ran once, and the pages show each row once.
    assert sorted(id for id in ran if id in good) == list(good)
    by_id = {task.id: task for task in delays.find(limit=1000)}
    assert sorted(all_pages(delays, limit=7)) == sorted(by_id)
    assert [task.meta for task in by_id.values() if task.meta] == [{"b": "c"}]
    assert all(json.dumps(task.as_json()) for task in by_id.values())
    ends = {id: end for id, (_, end) in expected.items()}
    assert {id: by_id[id].status for id in expected} == ends

    assert delays.get(tag="mail", key="of another task").id == owner.id
    assert [finding.tag for finding in delays.check()] == ["nobody"]

    assert_calls_raise_our_errors(delays, expected)
    delays.bulk.cancel(tag="mail")
    delays.policies.pause(tag="retries")
    run_all(world, expected)
    assert not delays.events.counts["loop.failed"] + delays.events.counts["chunk.failed"]


def insert_rows(world: World, good: Iterable[int]) -> dict[int, tuple[Any, Any]]:
    """Insert rows of nonsense and good ones. Return each row of nonsense, and how it shall end."""
    plain = {"tag": "'mail'", "message_body": "'{}'", "expected_time": PAST[world.kind]}
    expected = dict(enumerate(ACCEPTED, 1))
    with world.begin() as connection:
        for id, (nonsense, _) in expected.items():
            put(connection, world.table().name, plain | {"id": str(id)} | nonsense)
        for id in good:
            row = plain | {"id": str(id), "message_body": "'7'"}
            put(connection, world.table().name, row)
    return expected


def assert_calls_raise_our_errors(delays: DelayTasks, ids: Iterable[int]) -> None:
    """Each operator call succeeds or raises one of our errors, never one of the database driver."""
    calls: list[Callable[[int], Any]] = [partial(delays.get, attempts=True), delays.cancel]
    calls += [partial(delays.touch, delay=60), partial(delays.reschedule, delay=60), delays.rerun]
    for id, call in product(ids, [*calls, delays.cancel]):
        with suppress(TaskStateError):
            call(id)


def levels(world: World) -> list[int]:
    return sorted({level.priority for level in world.store.sweeps.levels(1)} | {0})


def run_all(world: World, ids: Iterable[int]) -> None:
    """Process the rows like a worker: from messages that name them, and from the table."""
    assert world.sweep()
    world.worker().run_entries([Entry(id, 0, 0) for id in ids])
    while world.drain(most=30, priorities=levels(world)).claimed:
        pass


#: Values of policies and of workers that no process could use.
RATES = [("0", "1"), ("-5", "1"), ("5", "NULL"), ("NULL", "5"), ("5", "0"), ("5", "1e300")]
POLICIES = [{"kind": "'other'"}, {"concurrency": "0"}, {"concurrency_per_key": "-2000000000"}]
POLICIES += [{"rate": rate, "rate_period_s": period_s} for rate, period_s in RATES]
NO_NUMBERS = [{"rate": "5", "rate_period_s": value} for value in ("'NaN'", "'Infinity'")]
NO_TYPES = [{"rate": "'x'", "rate_period_s": "1"}, {"rate": "5", "rate_period_s": "9e999"}]
NO_TYPES += [{"concurrency": "'x'"}]
POLICIES_BY = {"postgresql": NO_NUMBERS, "mysql": [], "sqlite": NO_TYPES}
NO_QUEUES = ("x", "5", "null", '{"default": 1}', "[" * 100_000, "")
WORKERS = [{"queues": f"'{text}'"} for text in NO_QUEUES]
WORKERS += [{"tags": "'x'"}, {"concurrency": "-1"}, {"busy": "-1"}]
WORKERS_BY: dict[str, Any] = {"postgresql": [], "mysql": []}
WORKERS_BY["sqlite"] = [{"queues": "x'00'"}, {"concurrency": "'x'"}, {"busy": "'x'"}]
WORKER = {"name": "'w'", "queues": "'[]'", "pool": "'prefork'", "concurrency": "1"}
PLAIN = {
    "task": {"id": "1", "tag": "'mail'", "message_body": "'{}'"},
    "policy": {"kind": "'tag'", "name": "'mail'", "is_paused": "false"},
    "worker": WORKER | dict.fromkeys(("seen_at", "started_at"), "CURRENT_TIMESTAMP"),
}


KINDS: list[Any] = [("task", REFUSED, REFUSED_BY), ("policy", POLICIES, POLICIES_BY)]
KINDS += [("worker", WORKERS, WORKERS_BY)]


@pytest.mark.parametrize(("name", "everywhere", "by_database"), KINDS)
def test_the_database_refuses_rows_that_no_process_could_use(
    world: World, name: str, everywhere: list[dict[str, str]], by_database: Any
) -> None:
    tables = {"task": "tasks", "policy": "policies", "worker": "workers"}
    table = world.table(tables[name]).name
    kind = world.kind
    for nonsense in everywhere + by_database[kind]:
        with world.engine.connect() as connection:
            if kind == "mysql":
                connection.exec_driver_sql("SET SESSION sql_mode = ''")
            # PostgreSQL reports a text that is not JSON instead of the constraint.
            with pytest.raises(DBAPIError, match=rf"ck_yb_delay_{name}|json|JSON|stack depth"):
                put(connection, table, PLAIN[name] | nonsense)
            connection.invalidate()  # its mode was changed
    with world.begin() as connection:
        put(connection, table, PLAIN[name])
