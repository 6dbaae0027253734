"""Rows with arbitrary column values from another program: none of them stops a worker or a
sweep, or harms other rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, create_engine
from sqlalchemy.orm import Session

from delaytasks import DelayTask, DelayTasks, Status
from delaytasks.core.errors import (
    CancelTooLateError,
    DelayTaskError,
    InvalidStatusError,
    StoreError,
)
from delaytasks.core.interfaces import Entry
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from tests.recording import delays_on, record

pytestmark = pytest.mark.slow

MOST = 2**63 - 1
PAST = {
    "postgresql": "clock_timestamp() - interval '10 s'",
    "mysql": "UTC_TIMESTAMP(6) - INTERVAL 10 SECOND",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f000', 'now', '-10 seconds')",
}
DONE, WAITS, FAILED = Status.DONE, Status.NOT_COMPLETE, Status.FAILED

#: Column values as SQL, and the expected status of the row.
EVERYWHERE: list[tuple[dict[str, str], Status | str]] = [
    ({"expected_time": "'0001-01-01'"}, DONE),
    ({"expected_time": "'0999-12-31'", "lapses": "1"}, DONE),
    ({"expected_time": "'9999-12-31 23:59:59'"}, WAITS),
    ({"create_time": "'9999-12-31'", "tag": "'nobody'"}, WAITS),
    ({"create_time": "'0001-01-01'", "tag": "'nobody'", "delay_time": str(MOST)}, WAITS),
    ({"delay_time": str(MOST), "tag": "'nobody'"}, WAITS),
    ({"delay_time": str(-MOST), "tag": "'nobody'"}, WAITS),
    ({"version": str(MOST)}, DONE),
    ({"version": str(2**62)}, DONE),
    ({"version": str(-MOST - 1)}, DONE),
    ({"version": str(MOST), "status": "5"}, DONE),
    (
        {"version": str(MOST), "status": "5", "tag": "'fails'", "headers": """'{"retry": 5}'"""},
        FAILED,
    ),
    ({"attempts": str(2**31 - 1)}, DONE),
    ({"attempts": str(-(2**31)), "tag": "'nobody'"}, WAITS),
    ({"attempts": "-2000", "tag": "'retries'"}, WAITS),
    ({"lapses": str(2**31 - 1)}, DONE),
    ({"lapses": "-3"}, DONE),
    ({"priority": "-5"}, DONE),
    ({"priority": "32767"}, DONE),
    ({"status": "99"}, "UNKNOWN_99"),
    ({"status": "-32768"}, "UNKNOWN_-32768"),
    ({"status": "3"}, Status.RUNNING),
    ({"status": "3", "lease_until": "'9999-01-01'"}, Status.RUNNING),
    (
        {
            "status": "3",
            "lease_until": "'2000-01-01'",
            "lapses": str(2**31 - 1),
            "version": str(MOST),
        },
        FAILED,
    ),
    (
        {
            "status": "3",
            "lease_until": "'2000-01-01'",
            "lapses": str(-(2**31)),
            "version": str(MOST),
        },
        DONE,
    ),
    ({"message_body": "'{'", "tag": "'retries'"}, WAITS),
    ({"message_body": "'{'"}, FAILED),
    ({"message_body": f"""'"{"x" * 10_000_000}"'"""}, DONE),
    ({"message_body": "''"}, FAILED),
    ({"message_body": f"'{'[' * 100_000}'"}, FAILED),
    ({"message_body": f"'{'9' * 5_000}'"}, FAILED),
    ({"headers": "''"}, DONE),
    ({"headers": "'[]'"}, DONE),
    ({"headers": f"'{'[' * 100_000}'"}, DONE),
    ({"headers": """'{"expires_s": NaN}'"""}, DONE),
    ({"headers": """'{"expires_s": -5}'"""}, DONE),
    ({"headers": """'{"expires_s": true}'"""}, DONE),
    ({"headers": f"""'{{"expires_s": {"9" * 400}}}'"""}, DONE),
    (
        {"headers": """'{"retry": 5, "max_wait_s": [], "expires_s": {}}'""", "tag": "'fails'"},
        FAILED,
    ),
    (
        {
            "headers": """'{"retry": {"retry_delays_s": {"a": 1}, "jitter": "x"}}'""",
            "tag": "'fails'",
        },
        FAILED,
    ),
    (
        {
            "headers": """'{"retry": {"retry_delays_s": [1e400, -1], "jitter": 0}}'""",
            "tag": "'fails'",
        },
        FAILED,
    ),
    (
        {
            "headers": f"""'{{"retry": {{"retry_delays_s": {[1] * 1001}, "jitter": 0}}}}'""",
            "tag": "'fails'",
        },
        FAILED,
    ),
    ({"tag": "''"}, WAITS),
    ({"task_key": "''"}, DONE),
    ({"task_key": "'of another task'"}, DONE),
    ({"concurrency_key": "''"}, DONE),
    ({"ip_address": str(-MOST), "worker": "''"}, DONE),
    ({"queue": "''"}, WAITS),
    ({"queue": "'../a b*'"}, WAITS),
]
ONLY: dict[str, list[tuple[dict[str, str], Status | str]]] = {
    "postgresql": [
        ({"expected_time": "'-infinity'"}, DONE),
        ({"expected_time": "'-infinity'", "lapses": "2"}, DONE),
        ({"expected_time": "'infinity'"}, WAITS),
        ({"expected_time": "'0044-03-15 BC'"}, DONE),
        ({"expected_time": "'20000-01-01'"}, WAITS),
        ({"create_time": "'20000-01-01'", "tag": "'nobody'"}, WAITS),
        ({"create_time": "'0044-03-15 BC'", "tag": "'nobody'"}, WAITS),
        ({"execution_time": "'20000-01-01'", "update_time": "'infinity'"}, DONE),
    ],
    "mysql": [
        ({"expected_time": "'0000-00-00'"}, DONE),
        ({"expected_time": "'2024-00-00'", "lapses": "2"}, DONE),
        ({"create_time": "'0000-00-00'", "tag": "'nobody'"}, WAITS),
    ],
    "sqlite": [
        ({"expected_time": "12345"}, DONE),
        ({"expected_time": "'soon'"}, WAITS),
        ({"expected_time": "'2024-99-99'"}, DONE),
        ({"create_time": "x'00ff'", "tag": "'nobody'"}, WAITS),
        ({"status": "'gone'"}, "UNKNOWN_'gone'"),
    ],
}


@pytest.fixture
def delays(store: Store, database_url: str) -> Iterator[DelayTasks]:
    made = delays_on(database_url, table_prefix="s_", sweep_s=0.001)
    record(made)
    yield made
    made.close()


def put(on: Connection, table: str, values: dict[str, str]) -> None:
    # Two of the drivers would read a single `%` as the start of a parameter.
    words = (
        values
        if on.dialect.name == "sqlite"
        else {name: value.replace("%", "%%") for name, value in values.items()}
    )
    on.exec_driver_sql(
        f"INSERT INTO {table} ({', '.join(words)}) VALUES ({', '.join(words.values())})"
    )


@pytest.mark.parametrize("by", ["messages", "the table alone"])
def test_a_row_with_invalid_values_stops_no_process_and_affects_no_other_row(
    store: Store, delays: DelayTasks, by: str
) -> None:
    ran: list[Any] = []
    delays.processor("mail")(lambda body, task: ran.append(task.id))
    delays.processor("fails")(lambda body: 1 / 0)
    delays.processor("retries", retries="1h")(lambda body: 1 / 0)
    owner = delays.schedule_delay("mail", {}, 3600, key="of another task")
    good = range(1000, 1100)
    expected = insert_rows(store, good)
    for _ in range(3):
        # No process arms a row whose queue name is invalid.
        named = [id for id, (nonsense, _) in expected.items() if "queue" not in nonsense]
        run_all(store, delays, named if by == "messages" else ())
    assert not delays.events.counts["loop.failed"] + delays.events.counts["chunk.failed"]
    assert delays.runner().run_due("default", levels(store), 100).claimed == 0, (
        "nothing is tried again at once"
    )

    # Each valid row ran once, and the pages show each row once.
    assert sorted(id for id in ran if id in good) == list(good)
    by_id = all_pages(delays)
    assert all(json.dumps(task.as_json()) for task in by_id.values())
    found = {id: by_id[id].status for id in expected}
    wrong = {
        id: (nonsense, found[id].name)
        for id, (nonsense, end) in expected.items()
        if end not in (found[id], found[id].name)
    }
    assert not wrong

    assert delays.get(tag="mail", key="of another task").id == owner.id
    kinds = {finding.problem.partition(" ")[0] for finding in delays.check() if finding.ids}
    assert kinds == {"an", "due", "RUNNING,", "in"}, (
        "what nobody will ever take, somebody can know of"
    )

    assert_calls_raise_our_errors(delays, expected)
    delays.cancel_many(tag="mail")
    delays.pause(tag="retries")
    run_all(store, delays, expected)
    assert not delays.events.counts["loop.failed"] + delays.events.counts["chunk.failed"]


def insert_rows(store: Store, good: Iterable[int]) -> dict[int, tuple[Any, Any]]:
    """Insert rows of nonsense and good ones. Return each row of nonsense, and how it shall end."""
    kind = {"mariadb": "mysql"}.get(name := store.database.url.get_backend_name(), name)
    plain = {"tag": "'mail'", "message_body": "'{}'", "expected_time": PAST[kind]}
    expected = dict(enumerate(EVERYWHERE + ONLY[kind], 1))
    with store.database.begin() as connection:
        if kind == "mysql":
            mode = connection.exec_driver_sql("SELECT @@sql_mode").scalar()
            connection.exec_driver_sql("SET sql_mode = ''")
        for id, (nonsense, _) in expected.items():
            put(connection, store.schema.tasks.name, plain | {"id": str(id)} | nonsense)
        for id in good:
            row = plain | {"id": str(id), "message_body": "'7'"}
            put(connection, store.schema.tasks.name, row)
        if kind == "mysql":
            connection.exec_driver_sql("SET sql_mode = %s", (mode,))
    return expected


def all_pages(delays: DelayTasks) -> dict[int, DelayTask]:
    by_id, cursor = dict[int, DelayTask](), None
    for _ in range(100):
        page = delays.find(limit=7, cursor=cursor)
        by_id |= {task.id: task for task in page}
        cursor = page.cursor
        if cursor is None:
            return by_id
    raise AssertionError("the pages have no end")


def assert_calls_raise_our_errors(delays: DelayTasks, ids: Iterable[int]) -> None:
    """Each operator call succeeds or raises one of our errors, never one of the database driver."""
    calls: list[Callable[[int], Any]] = [
        delays.get,
        delays.attempts,
        lambda id: delays.touch(id, 60),
        lambda id: delays.reschedule(id, 60),
        partial(delays.cancel, strict=True),
        delays.rerun,
        partial(delays.cancel, strict=True),
    ]
    refused = {(id, type(error)) for id in ids for error in map(partial(refusal, id), calls)}
    assert {kind for _, kind in refused} <= {type(None), InvalidStatusError, CancelTooLateError}, (
        refused
    )


def levels(store: Store) -> list[int]:
    return sorted({level.priority for level in store.sweeps.levels(1)} | {0})


def run_all(store: Store, delays: DelayTasks, ids: Iterable[int]) -> None:
    """Process the rows like a worker: from messages that name them, and from the table."""
    assert runtime_of(delays).sweeper.sweep(0)
    delays.runner().run([Entry(id, 0, 0) for id in ids])
    while delays.runner().run_due("default", levels(store), 30).claimed:
        pass


def refusal(id: int, call: Callable[[int], Any]) -> DelayTaskError | None:
    try:
        call(id)
    except DelayTaskError as error:
        return error
    return None


def test_an_instant_that_the_callers_driver_cannot_parse_raises_a_delaytasks_error(
    store: Store, database_url: str
) -> None:
    if store.database.url.get_backend_name() != "postgresql":
        return  # the other drivers return values that they cannot parse
    delays = delays_on(database_url, table_prefix="s_")
    row = {"id": "5", "tag": "'mail'", "message_body": "'{}'", "expected_time": "'0044-03-15 BC'"}
    with store.database.begin() as connection:
        put(connection, store.schema.tasks.name, row)
    assert delays.get(5).expected_time.year == 1
    engine = create_engine(database_url)
    with Session(engine) as session:
        for call in (
            lambda: delays.get(5, session=session),
            lambda: delays.cancel(5, session=session),
        ):
            with pytest.raises(StoreError, match="another program"):
                call()
    engine.dispose()
    delays.close()
