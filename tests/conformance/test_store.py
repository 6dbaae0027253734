"""The suite of the store, on every database."""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import Connection, String, cast, event, insert, select, text, update

from delaytasks.core.bulk import AuditEntry, filter_of
from delaytasks.core.clock import to_us
from delaytasks.core.errors import (
    CancelTooLateError,
    DuplicateTaskError,
    InvalidQueryError,
    InvalidStatusError,
    OutcomeUnknownError,
    StaleVersionError,
    StoreError,
    StoreUnavailableError,
    TaskNotFoundError,
    TaskStateError,
)
from delaytasks.core.interfaces import Entry, Lapsed, Level, Miss, Settlement
from delaytasks.core.json_text import dump_json
from delaytasks.core.states import FINISHED, MOST_VERSIONS, MOVES, Status
from delaytasks.core.task import DelayTask
from delaytasks.storage import bulk as store_bulk
from delaytasks.storage import database, settlements
from delaytasks.storage import inserts as store_inserts
from delaytasks.storage import rows as store_rows
from delaytasks.storage import stats as stats_module
from delaytasks.storage.claims import Claims
from delaytasks.storage.database import Database
from delaytasks.storage.prepared_statements import Prepared
from delaytasks.storage.rows import MAX_TEXT, values_of
from delaytasks.storage.stats import Stats
from delaytasks.storage.store import Store
from delaytasks.storage.sweep_queries import SweepQueries
from tests.conftest import open_store, settings_for
from tests.counting import counted
from tests.proxy import Proxy

NASTY = (
    "tab\there, line\nbreak, return\rhere, back\\slash, \\N, \\., "
    "'quotes' \"double\", %s :name, 😀 ünï, <b>&"
)
_ids = itertools.count(1_000_000)


def task(store: Store, due_s: float = -10.0, **fields: Any) -> DelayTask:
    """Return an unwritten task that is due `due_s` seconds from now."""
    now = store.tasks.now()
    values: dict[str, Any] = {
        "id": next(_ids),
        "tag": "mail",
        "body_json": "{}",
        "expected_time": seconds(now, due_s),
    }
    return DelayTask(**{**values, "create_time": now, **fields})


def seconds(instant: datetime, more: float) -> datetime:
    return instant + timedelta(seconds=more)


def add(store: Store, due_s: float = -10.0, **fields: Any) -> DelayTask:
    made = task(store, due_s, **fields)
    assert store.tasks.insert(made)
    return made


def put(store: Store, status: Status, **fields: Any) -> DelayTask:
    """Insert a row directly with this status."""
    made = task(store, **fields)
    with store.database.begin() as connection:
        row = {
            **values_of(made, store.schema),
            "status": int(status),
            "attempts": made.attempts,
            "lapses": made.lapses,
        }
        connection.execute(insert(store.schema.tasks).values(row))
    return replace(made, status=status)


def read(store: Store, id: int) -> DelayTask:
    found = store.tasks.get(id)
    assert found is not None
    return found


def entry(made: DelayTask) -> Entry:
    return Entry.of(made, to_us)


def lapse_all(store: Store, tasks: Sequence[DelayTask], max_lost_leases: int = 5) -> int:
    """End the leases of these tasks, and return how many rows the sweep released."""
    t = store.schema.tasks
    with store.database.begin() as connection:
        over = seconds(store.tasks.now(), -1)
        connection.execute(
            update(t).where(t.c.id.in_([made.id for made in tasks])).values(lease_until=over)
        )
    return store.sweeps.lapse(max_lost_leases, 100).total


def beside(store: Store, url: str) -> Store:
    """Return another store on the same tables."""
    prefix = store.schema.tasks.name.removesuffix("yb_delay_task_message")
    return Store(url, settings_for(url, table_prefix=prefix))


@pytest.fixture
def claims(store: Store) -> Claims:
    return store.claims("worker-1", 0x7F000001)


# -- schedule -------------------------------------------------------------------------------------


def test_a_task_comes_back_as_it_was_written(store: Store) -> None:
    body = json.dumps({"text": NASTY}, ensure_ascii=False)
    made = add(
        store, 60.0, body_json=body, queue="q", priority=7, delay_s=60, concurrency_key="ä" * 255
    )
    found = read(store, made.id)
    assert replace(found, update_time=None) == made
    assert found.body == {"text": NASTY}
    assert found.create_time == found.update_time == made.create_time
    assert found.expected_time.utcoffset() == timedelta(0)


def test_inserting_the_same_id_again_changes_nothing(store: Store) -> None:
    made = add(store)
    assert not store.tasks.insert(replace(made, body_json='"other"'))
    assert read(store, made.id).body == {}


def test_an_id_that_exists_leaves_the_callers_transaction_usable(store: Store) -> None:
    made = add(store)
    with store.database.begin() as connection:
        assert not store.tasks.insert(made, connection)
        second = task(store)
        assert store.tasks.insert(second, connection)
    assert store.tasks.get(second.id) is not None


def test_many_tasks_are_written_in_one_go(store: Store) -> None:
    bodies = [
        json.dumps(body, ensure_ascii=False)
        for body in (NASTY, "\\.", "\\N", "", "\\\\n", "\t", "😀", 2**62)
    ]
    made = [task(store, 5.0, body_json=body, priority=n % 10) for n, body in enumerate(bodies)]
    assert store.tasks.insert_many(made)
    assert [read(store, one.id).body_json for one in made] == bodies
    assert [read(store, one.id).expected_time for one in made] == [
        one.expected_time for one in made
    ]


@pytest.mark.parametrize("is_json", [False, True], ids=["best", "json"])
def test_tasks_that_differ_in_all_columns_are_the_same_together_and_one_by_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_json: bool
) -> None:
    if is_json:
        for way in ("_can_copy", "_binds"):
            monkeypatch.setattr(store.tasks._insert_bulk, way, False)
    monkeypatch.setattr(store_inserts, "_BOUND_ROWS", 3)
    headers, long_s = '{"expires_s":5}', 3_000_000_000
    made = [
        task(store),
        task(
            store,
            61.5,
            tag="a",
            body_json="[1]",
            queue="q",
            priority=9,
            delay_s=long_s,
            headers_json=headers,
        ),
        task(
            store, 86400.25, tag="b'\"\\", body_json="null", priority=1, concurrency_key="it's \\ é"
        ),
    ]
    made[1] = replace(made[1], create_time=seconds(store.tasks.now(), -60))
    twins = [replace(one, id=task(store).id) for one in made]
    assert store.tasks.insert_many(made)
    for twin in twins:
        assert store.tasks.insert(twin)
    assert [stored_as(store, one) for one in made] == [stored_as(store, twin) for twin in twins]


def stored_as(store: Store, task: DelayTask) -> Sequence[Any]:
    """Return the columns as text.

    SQLite accepts a value of any type, and compares instants as text.
    """
    t = store.schema.tasks
    columns = [cast(column, String(1000)) for column in t.c if column.name != "id"]
    with store.database.begin() as connection:
        return connection.execute(select(*columns).where(t.c.id == task.id)).one()


def test_many_tasks_with_text_that_copy_gives_a_meaning_to(store: Store) -> None:
    bodies = (NASTY, "\\.", "\\N", "\r\n", "\\t", "a\x0bb\x0cc\x08")
    made = [task(store, tag=NASTY[:100], body_json=body) for body in bodies]
    assert store.tasks.insert_many(made)
    assert [read(store, one.id).body_json for one in made] == [one.body_json for one in made]
    assert {read(store, one.id).tag for one in made} == {NASTY[:100]}


def test_many_more_tasks_than_go_at_a_time(store: Store) -> None:
    made = [task(store, body_json=f"[{n}]") for n in range(450)]
    made[150] = task(store, body_json=json.dumps(["x" * MAX_TEXT]))
    assert store.tasks.insert_many(made)
    assert [read(store, made[n].id).body for n in (0, 199, 200, 449)] == [[0], [199], [200], [449]]
    assert counted(store)[Status.NOT_COMPLETE] == 450


def test_who_is_interrupted_while_rows_are_written_hears_of_it_and_none_is_there(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(task: DelayTask) -> tuple[Any, ...]:
        if task is made[300]:
            raise KeyboardInterrupt
        return stored(task)

    stored, made = store_rows._values, [task(store) for _ in range(400)]
    monkeypatch.setattr(store_rows, "_values", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.tasks.insert_many(made)
    monkeypatch.undo()
    assert counted(store)[Status.NOT_COMPLETE] == 0
    assert store.tasks.insert_many(made)


def test_many_large_tasks_are_written_in_one_go(store: Store) -> None:
    body = json.dumps('"' * 120_000)
    made = [task(store, body_json=f"[{n},{body}]") for n in range(100)]
    assert store.tasks.insert_many(made)
    assert counted(store)[Status.NOT_COMPLETE] == 100


def test_many_tasks_of_which_one_id_exists_are_all_left_out(store: Store) -> None:
    old, body = add(store), json.dumps("x" * 900_000)
    # Databases without COPY need several statements for this size.
    made = [task(store, body_json=body) for _ in range(5)] + [task(store) for _ in range(150)]
    assert not store.tasks.insert_many([*made, replace(old, body_json='"other"'), task(store)])
    assert counted(store)[Status.NOT_COMPLETE] == 1
    assert read(store, old.id).body == {}


def test_many_tasks_belong_to_the_callers_transaction(store: Store) -> None:
    old, made = add(store), [task(store) for _ in range(150)]
    with store.database.tx.connect() as connection:
        transaction = connection.begin()
        assert not store.tasks.insert_many([*made, old], connection)
        assert store.tasks.get(made[0].id, connection) is None
        assert store.tasks.insert_many(made, connection)
        assert store.tasks.get(made[0].id, connection) is not None
        transaction.rollback()
    assert counted(store)[Status.NOT_COMPLETE] == 1


def test_a_tag_or_key_that_differs_in_case_or_accents_is_another_one(store: Store) -> None:
    store.tasks.insert_keyed(task(store, tag="Mail", key="k"), "reject")
    store.tasks.insert_keyed(task(store, tag="mail", key="k"), "reject")
    store.tasks.insert_keyed(task(store, tag="mail", key="K"), "reject")
    store.tasks.insert_keyed(task(store, tag="mail", key="ḱ"), "reject")
    assert len(store.tasks.find("mail", None, None, None, None, None, 10)) == 3


# -- keys -----------------------------------------------------------------------------------------


def keyed(store: Store, due_s: float = -10.0, **fields: Any) -> DelayTask:
    made, is_new = store.tasks.insert_keyed(task(store, due_s, key="order-1", **fields), "reject")
    assert is_new
    return made


def test_a_live_key_rejects_and_names_the_one_that_has_it(store: Store) -> None:
    first = keyed(store)
    second = task(store, key="order-1")
    with pytest.raises(DuplicateTaskError, match="order-1") as caught:
        store.tasks.insert_keyed(second, "reject")
    assert caught.value.id == first.id
    assert store.tasks.get(second.id) is None
    assert store.tasks.id_of_key("mail", "order-1") == first.id


def test_a_live_key_keeps_what_it_has(store: Store) -> None:
    first = keyed(store)
    held, is_new = store.tasks.insert_keyed(task(store, key="order-1", body_json='"new"'), "keep")
    assert (held.id, held.body, is_new) == (first.id, {}, False)


def test_scheduling_again_with_the_same_id_and_key_is_harmless(store: Store) -> None:
    first = keyed(store)
    again, is_new = store.tasks.insert_keyed(first, "reject")
    assert (again.id, is_new) == (first.id, False)


def test_replacing_gives_the_same_id_a_new_version_body_and_time(
    store: Store, claims: Claims
) -> None:
    first = keyed(store, -10.0)
    new = task(store, 60.0, key="order-1", body_json='"new"', priority=3, queue="q")
    now, is_new = store.tasks.insert_keyed(new, "replace")
    assert (now.id, now.version, is_new) == (first.id, 1, True)
    found = read(store, first.id)
    assert (found.body, found.version, found.expected_time) == ("new", 1, new.expected_time)
    assert (found.priority, found.queue, found.status) == (3, "q", Status.NOT_COMPLETE)
    assert store.tasks.get(new.id) is None
    assert claims.claim([entry(first)]) == []


def test_replacing_a_held_task_makes_it_wait_again(store: Store) -> None:
    first = keyed(store)
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(update(t).where(t.c.id == first.id).values(status=int(Status.HELD)))
    store.tasks.insert_keyed(task(store, key="order-1"), "replace")
    assert read(store, first.id).status is Status.NOT_COMPLETE


def test_replacing_a_running_task_makes_a_new_one_which_has_the_key(
    store: Store, claims: Claims
) -> None:
    first = keyed(store)
    running = claims.claim([entry(first)])
    new, is_new = store.tasks.insert_keyed(task(store, key="order-1", body_json='"new"'), "replace")
    assert is_new
    assert new.id != first.id
    assert store.tasks.id_of_key("mail", "order-1") == new.id
    assert claims.settle([Settlement(running[0], "succeed")]) == {first.id}
    assert store.tasks.id_of_key("mail", "order-1") == new.id


@pytest.mark.parametrize("move", ["succeed", "fail"])
def test_a_finished_task_leaves_its_key(store: Store, claims: Claims, move: Any) -> None:
    first = keyed(store)
    claims.settle([Settlement(one, move) for one in claims.claim([entry(first)])])
    assert store.tasks.id_of_key("mail", "order-1") is None
    assert keyed(store).id != first.id


def test_a_task_that_is_given_back_keeps_its_key(store: Store, claims: Claims) -> None:
    first = keyed(store)
    claims.settle([Settlement(one, "give_back") for one in claims.claim([entry(first)])])
    assert store.tasks.id_of_key("mail", "order-1") == first.id


def test_a_cancelled_task_leaves_its_key(store: Store) -> None:
    first = keyed(store)
    store.tasks.cancel(first.id)
    assert store.tasks.id_of_key("mail", "order-1") is None
    assert keyed(store).id != first.id


def test_a_key_whose_task_was_deleted_can_be_had_again(store: Store) -> None:
    first = keyed(store)
    with store.database.begin() as connection:
        connection.execute(store.schema.tasks.delete())
    assert keyed(store).id != first.id


def test_a_key_whose_task_another_program_finished_can_be_had_again(store: Store) -> None:
    first = keyed(store)
    with store.database.begin() as connection:
        connection.execute(update(store.schema.tasks).values(status=int(Status.DONE)))
    assert keyed(store).id != first.id


def test_retrying_takes_the_key_again_or_says_who_has_it(store: Store) -> None:
    first = keyed(store)
    store.tasks.cancel(first.id)
    store.tasks.retry(first.id, store.tasks.now())
    assert store.tasks.id_of_key("mail", "order-1") == first.id
    store.tasks.cancel(first.id)
    second = keyed(store)
    with pytest.raises(DuplicateTaskError) as caught:
        store.tasks.retry(first.id, store.tasks.now())
    assert caught.value.id == second.id
    assert read(store, first.id).status is Status.CANCELLED


def test_of_many_callers_with_one_key_one_gets_it(store: Store) -> None:
    made = [task(store, 60.0, key="order-1") for _ in range(8)]

    def schedule(one: DelayTask) -> bool:
        try:
            return store.tasks.insert_keyed(one, "reject")[1]
        except DuplicateTaskError:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(schedule, made)) == {True: 1, False: 7}
    assert len(store.tasks.find("mail", None, None, None, None, None, 10)) == 1


def test_a_key_names_its_only_live_task_however_replacing_and_settling_meet(
    store: Store, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.database.url.get_backend_name() == "postgresql":
        # Without this patch, a retry would hide a deadlock, apart from the second that each retry
        # takes.
        monkeypatch.setattr(Database, "run", lambda self, work, *_, **__: work())
    made = [task(store, key="order-1") for _ in range(30)]
    ended = threading.Event()
    errors: list[BaseException] = []

    def settle() -> None:
        try:
            while not ended.is_set():
                claims.settle(
                    [Settlement(one, "succeed") for one in claims.claim_due("default", [0], 10)]
                )
        except BaseException as error:
            errors.append(error)

    worker = threading.Thread(target=settle)
    worker.start()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda one: store.tasks.insert_keyed(one, "replace"), made))
    ended.set()
    worker.join()
    assert errors == []
    live = [
        one.id
        for one in store.tasks.find("mail", Status.NOT_COMPLETE, "order-1", None, None, None, 100)
    ]
    assert live in ([], [store.tasks.id_of_key("mail", "order-1")])


# -- look up --------------------------------------------------------------------------------------


def test_what_is_not_there_is_none(store: Store) -> None:
    assert store.tasks.get(5) is None
    assert store.tasks.id_of_key("mail", "order-1") is None


def test_pages_of_a_status_are_in_due_order_over_all_queues_and_priorities(store: Store) -> None:
    added = [add(store, n - 100.0, queue=f"q{n % 3}", priority=n % 2) for n in range(13)]
    found: list[int] = []
    cursor = None
    while True:
        page = store.tasks.find(None, Status.NOT_COMPLETE, None, None, None, cursor, 5)
        found += [one.id for one in page.tasks]
        cursor = page.cursor
        if cursor is None:
            break
    assert found == [one.id for one in added]


def test_find_answers_by_each_of_its_questions(store: Store, claims: Claims) -> None:
    now = store.tasks.now()
    mail = add(store, 10.0, tag="mail")
    sms = add(store, 20.0, tag="sms")
    order = keyed(store, 30.0, tag="order")

    def found(**question: Any) -> list[int]:
        names = ("tag", "status", "key", "since", "until", "cursor")
        page = store.tasks.find(**{**dict.fromkeys(names), "limit": 10, **question})
        assert page.cursor is None
        return [one.id for one in page]

    assert found() == [mail.id, sms.id, order.id]
    assert found(tag="sms") == [sms.id]
    assert found(key="order-1") == [order.id]
    assert found(since=seconds(now, 15), until=seconds(now, 25)) == [sms.id]
    assert found(since=sms.expected_time, until=order.expected_time) == [sms.id]
    store.tasks.cancel(sms.id)
    assert found(status=Status.CANCELLED) == [sms.id]
    assert found(status=Status.NOT_COMPLETE) == [mail.id, order.id]


def test_pages_show_each_resting_row_once_while_others_move(store: Store) -> None:
    now = seconds(store.tasks.now(), 1000)
    # Many rows have the same due time, so the cursor must compare ids and times.
    resting = [add(store, expected_time=seconds(now, n // 4)) for n in range(20)]
    moving = [add(store, expected_time=seconds(now, n)) for n in range(5)]
    seen: list[int] = []
    cursor = None
    for step in range(25):
        page = store.tasks.find(None, None, None, None, None, cursor, 3)
        seen += [one.id for one in page]
        cursor = page.cursor
        if cursor is None:
            break
        if step < 5:
            store.tasks.reschedule(moving[step].id, seconds(now, -1 if step % 2 else 500))
    assert cursor is None
    assert Counter(one for one in seen if one in {r.id for r in resting}) == {
        one.id: 1 for one in resting
    }


@pytest.mark.parametrize("cursor", ["nonsense", "", "AAAA", "MTIz", "ОК"])
def test_a_cursor_that_find_never_gave_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(InvalidQueryError, match="cursor"):
        store.tasks.find(None, None, None, None, None, cursor, 10)


def test_counts_name_every_status(store: Store) -> None:
    for status, many in ((Status.NOT_COMPLETE, 3), (Status.FAILED, 2)):
        for _ in range(many):
            put(store, status)
    counts = Stats(store.database, store.schema).counts()
    assert {status: rows for status, (rows, _) in counts.items()} == counted(store)
    assert counted(store) == {**dict.fromkeys(Status, 0), Status.NOT_COMPLETE: 3, Status.FAILED: 2}


def test_the_databases_clock_moves_within_a_transaction(store: Store) -> None:
    with store.database.begin() as connection:
        first = connection.execute(store.tasks._get, {"task_id": 1}).first()
        assert first is None
        before = store.tasks.now()
        assert (
            add(store, 0.0).create_time >= before
            if store.database.can.server_side_cursors
            else True
        )
    assert store.tasks.now() >= before


# -- operators' moves -----------------------------------------------------------------------------

OPERATORS: dict[str, Callable[[Store, DelayTask], Any]] = {
    "cancel": lambda store, made: store.tasks.cancel(made.id),
    "reschedule": lambda store, made: store.tasks.reschedule(
        made.id, seconds(made.expected_time, 60)
    ),
    "retry": lambda store, made: store.tasks.retry(made.id, seconds(made.expected_time, 60)),
}


@pytest.mark.parametrize("status", list(Status), ids=lambda status: status.name)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operators_move_is_made_from_its_sources_and_refused_elsewhere(
    store: Store, name: str, status: Status
) -> None:
    made, move = put(store, status, lapses=2, attempts=3), MOVES[name]
    if status in move.sources:
        moved = OPERATORS[name](store, made)
        found = read(store, made.id)
        assert (found.status, found.version) == (moved.status, moved.version) == (move.target, 1)
        later = 0 if name == "cancel" else 60
        assert found.expected_time == moved.expected_time == seconds(made.expected_time, later)
        assert (found.attempts, found.lapses) == ((0, 0) if name == "retry" else (3, 2))
        assert found.update_time is not None
        assert made.create_time is not None
        assert found.update_time >= made.create_time
        return
    if name == "cancel" and status is Status.CANCELLED:
        assert store.tasks.cancel(made.id) is None
    else:
        expected = (
            CancelTooLateError
            if (name, status) == ("cancel", Status.RUNNING)
            else InvalidStatusError
        )
        with pytest.raises(expected, match=str(made.id)):
            OPERATORS[name](store, made)
    found = read(store, made.id)
    assert (found.status, found.version) == (status, 0)


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operators_move_names_the_task_that_is_not_there(store: Store, name: str) -> None:
    with pytest.raises(TaskNotFoundError, match="no task") as caught:
        OPERATORS[name](store, task(store))
    assert caught.value.id is not None


def test_a_move_with_a_stale_version_is_refused(store: Store) -> None:
    made = add(store)
    store.tasks.reschedule(made.id, made.expected_time, version=0)
    for name in ("reschedule", "retry"):
        with pytest.raises(StaleVersionError, match="version 1, not 0"):
            getattr(store.tasks, name)(made.id, made.expected_time, version=0)
    with pytest.raises(StaleVersionError):
        store.tasks.cancel(made.id, version=0)
    assert read(store, made.id).version == 1


def test_of_two_operators_at_once_each_sees_what_the_other_did(store: Store) -> None:
    made = add(store)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: store.tasks.cancel(made.id), range(4)))
    assert [answer is None for answer in answers].count(False) == 1
    assert read(store, made.id).version == 1


def test_a_move_belongs_to_the_callers_transaction(store: Store) -> None:
    made = add(store)
    with store.database.tx.connect() as connection:
        transaction = connection.begin()
        store.tasks.cancel(made.id, on=connection)
        transaction.rollback()
    assert read(store, made.id).status is Status.NOT_COMPLETE


@pytest.mark.parametrize("name", OPERATORS)
def test_a_move_that_meets_its_own_first_try_is_done_or_unknown_and_never_refused(
    store: Store, name: str
) -> None:
    url = store.database.url
    if url.host is None:
        return  # SQLite has no network answer that could be lost
    proxy = Proxy(url.host, url.port or {"postgresql": 5432, "mysql": 3306}[url.get_backend_name()])
    other = beside(store, proxy.url(url.render_as_string(hide_password=False)))
    made = put(store, Status.FAILED if name == "retry" else Status.NOT_COMPLETE)
    other.tasks.cancel(add(store).id)  # opens the connection
    proxy.cut_answer(rb"COMMIT(?!TED)")
    if name == "cancel":
        left = other.tasks.cancel(made.id, version=0)
        assert left is not None
        assert (left.status, left.version) == (Status.CANCELLED, 1)
    else:
        with pytest.raises(OutcomeUnknownError, match=f"look at task {made.id}") as caught:
            getattr(other.tasks, name)(made.id, seconds(made.expected_time, 60), version=0)
        assert isinstance(caught.value.__cause__, StaleVersionError)
    assert proxy.cut == 1
    assert read(store, made.id).version == 1
    other.close()
    proxy.close()


@pytest.mark.parametrize("status", list(Status), ids=lambda status: status.name)
def test_touch_only_moves_later_and_keeps_the_version(store: Store, status: Status) -> None:
    made = put(store, status)
    can = status in MOVES["reschedule"].sources
    later, earlier = seconds(made.expected_time, 60), seconds(made.expected_time, -60)
    assert store.touches.touch(made.id, earlier) is can
    assert read(store, made.id).expected_time == made.expected_time
    assert store.touches.touch(made.id, later) is can
    found = read(store, made.id)
    assert found.expected_time == (later if can else made.expected_time)
    assert (found.version, found.status) == (0, status)


# -- claim ----------------------------------------------------------------------------------------


def test_a_claim_takes_what_is_due_and_says_who_runs_it(store: Store, claims: Claims) -> None:
    made = add(store, -10.0, body_json='{"n":1}', key=None, priority=2, queue="q")
    before = store.tasks.now()
    [claimed] = claims.claim([entry(made)])
    assert (claimed.id, claimed.version, claimed.status, claimed.attempts) == (
        made.id,
        1,
        Status.RUNNING,
        1,
    )
    assert (claimed.body, claimed.priority, claimed.queue, claimed.lapses) == ({"n": 1}, 2, "q", 0)
    found = read(store, made.id)
    assert (found.status, found.version, found.attempts) == (Status.RUNNING, 1, 1)
    assert (found.worker, found.ip_address) == ("worker-1", "127.0.0.1")
    assert found.execution_time is not None
    assert found.lease_until is not None
    assert found.execution_time >= before
    assert timedelta(seconds=59) < found.lease_until - found.execution_time < timedelta(seconds=61)


def test_a_task_is_never_claimed_early(store: Store, claims: Claims) -> None:
    made = add(store, 0.25)
    while not (claimed := claims.claim([entry(made)])):
        assert store.tasks.now() < seconds(made.expected_time, 5)
    assert read(store, made.id).execution_time >= made.expected_time  # type: ignore[operator]
    assert len(claimed) == 1


def test_a_claim_passes_over_what_is_not_due_moved_on_or_unknown(
    store: Store, claims: Claims
) -> None:
    due, later, moved, done, gone = (
        add(store),
        add(store, 60.0),
        add(store),
        put(store, Status.DONE),
        task(store),
    )
    store.tasks.reschedule(moved.id, moved.expected_time)
    named = [due, later, moved, done, gone]
    assert [one.id for one in claims.claim([entry(one) for one in named])] == [due.id]
    misses = {miss.id: miss for miss in claims.misses([one.id for one in named])}
    assert misses[later.id] == Miss(later.id, 0, Status.NOT_COMPLETE, to_us(later.expected_time), 0)
    assert misses[moved.id].version == 1
    assert misses[done.id].status is Status.DONE
    assert gone.id not in misses
    assert claims.claim([entry(due)]) == []


def test_nothing_to_claim_asks_nothing(store: Store, claims: Claims) -> None:
    seen: list[str] = []
    event.listen(
        store.database.auto,
        "before_cursor_execute",
        lambda *given: seen.append(given[2]),
        once=True,
    )
    assert claims.claim([]) == []
    assert claims.settle([]) == set()
    assert claims.misses([]) == []
    assert claims.misses(iter(())) == []
    assert seen == []
    store.tasks.get(1)
    assert len(seen) == 1


def test_a_row_that_somebody_has_locked_is_passed_over_not_waited_for(
    store: Store, claims: Claims
) -> None:
    if store.database.url.get_backend_name() == "sqlite":
        return  # SQLite has one writer at a time and no row locks
    locked, free = add(store), add(store)
    with ThreadPoolExecutor(1) as pool, store.database.begin() as connection:
        assert store.tasks._moves.locked(connection, locked.id) is not None
        named = pool.submit(claims.claim, [entry(locked), entry(free)])
        assert [one.id for one in named.result(10)] == [free.id]
        assert pool.submit(claims.claim_due, "default", [0], 10).result(10) == []
    assert [one.id for one in claims.claim_due("default", [0], 10)] == [locked.id]


def test_claim_due_takes_the_highest_priority_first_then_the_oldest(
    store: Store, claims: Claims
) -> None:
    low_old, low_new = add(store, -50.0), add(store, -20.0)
    high_new, high_old = add(store, -5.0, priority=9), add(store, -6.0, priority=9)
    add(store, -60.0, queue="elsewhere")
    add(store, 60.0)
    add(store, -60.0, priority=5)  # a priority that the claim does not request
    assert [one.id for one in claims.claim_due("default", [0, 9], 3)] == [
        high_old.id,
        high_new.id,
        low_old.id,
    ]
    assert [one.id for one in claims.claim_due("default", [0, 9], 3)] == [low_new.id]
    assert claims.claim_due("default", [0, 9], 3) == []


def test_a_row_that_lapsed_is_claimed_alone(store: Store, claims: Claims) -> None:
    bad, good = add(store), add(store)
    lapse_all(store, claims.claim([entry(bad)]))
    bad = read(store, bad.id)
    assert (bad.status, bad.lapses, bad.version) == (Status.NOT_COMPLETE, 1, 2)
    assert [one.id for one in claims.claim([entry(bad), entry(good)])] == [good.id]
    assert claims.claim_due("default", [0], 10) == []
    assert claims.claim_alone(bad.id, 1) == []
    [alone] = claims.claim_alone(bad.id, bad.version)
    assert (alone.id, alone.lapses, alone.attempts) == (bad.id, 1, 2)
    assert claims.claim_alone(bad.id, bad.version) == []


def test_suspects_come_one_by_one_from_their_queue(store: Store, claims: Claims) -> None:
    made = [add(store, -20.0 + n) for n in range(2)]
    other = add(store, queue="q")
    lapse_all(store, claims.claim([entry(one) for one in (*made, other)]))
    add(store)
    abandoned = [claims.claim_abandoned("default") for _ in range(3)]
    assert [[task.id for task in some] for some in abandoned] == [[made[0].id], [made[1].id], []]


def test_many_workers_share_a_backlog_and_each_row_runs_once(store: Store) -> None:
    made = [task(store, -100.0 + n / 100) for n in range(1000)]
    store.tasks.insert_many(made)
    start = threading.Barrier(6)

    def work(number: int) -> list[int]:
        claims, mine = store.claims(f"worker-{number}", None), []
        start.wait()
        while chunk := claims.claim_due("default", [0], 37):
            accepted = claims.settle([Settlement(one, "succeed") for one in chunk])
            assert accepted == {one.id for one in chunk}
            mine += [one.id for one in chunk]
        return mine

    with ThreadPoolExecutor(6) as pool:
        shares = list(pool.map(work, range(6)))
    assert Counter(id for share in shares for id in share) == {one.id: 1 for one in made}
    assert counted(store)[Status.DONE] == 1000


def test_messages_that_name_the_same_rows_run_each_once(store: Store) -> None:
    made = [task(store) for _ in range(300)]
    store.tasks.insert_many(made)
    entries = [entry(one) for one in made]

    def work(number: int) -> list[int]:
        claims = store.claims(f"worker-{number}", None)
        return [one.id for n in range(0, 300, 50) for one in claims.claim(entries[n : n + 50])]

    with ThreadPoolExecutor(4) as pool:
        claimed = Counter(id for share in pool.map(work, range(4)) for id in share)
    # A row that a claim skipped because of a lock may wait for the slow path. No task runs twice.
    assert set(claimed.values()) == {1}
    rest = {one.id for one in store.claims("last", None).claim_due("default", [0], 1000)}
    assert set(claimed) | rest == {one.id for one in made}
    assert not set(claimed) & rest


def test_a_row_that_is_named_many_times_is_claimed_once(store: Store, claims: Claims) -> None:
    """Two messages contained the task, and both became due."""
    made = [add(store) for _ in range(3)]
    named = [entry(one) for one in made]
    assert sorted(one.id for one in claims.claim([*named, *named, named[0]])) == sorted(
        one.id for one in made
    )


# -- settle ---------------------------------------------------------------------------------------


def test_settling_writes_the_end_of_each_run(store: Store, claims: Claims) -> None:
    won, lost, back = (add(store) for _ in range(3))
    claimed = {one.id: one for one in claims.claim([entry(one) for one in (won, lost, back)])}
    began, due = store.tasks.now(), seconds(store.tasks.now(), 30)
    ends = [
        Settlement(claimed[won.id], "succeed", began=began),
        Settlement(claimed[lost.id], "fail", error=NASTY),
        Settlement(claimed[back.id], "give_back", due=due, error="no such processor, tag='mail'"),
    ]
    assert claims.settle(ends) == {won.id, lost.id, back.id}
    done, failed, waiting = (read(store, one.id) for one in (won, lost, back))
    assert (done.status, done.version, done.attempts, done.error) == (Status.DONE, 2, 1, None)
    assert done.execution_time == began
    assert (failed.status, failed.error) == (Status.FAILED, NASTY)
    assert (waiting.status, waiting.attempts, waiting.expected_time) == (
        Status.NOT_COMPLETE,
        0,
        due,
    )
    assert waiting.error == "no such processor, tag='mail'"
    assert [one.lease_until for one in (done, failed, waiting)] == [None] * 3
    assert [(one.worker, one.ip_address) for one in (done, failed)] == [
        ("worker-1", "127.0.0.1")
    ] * 2
    assert (waiting.worker, waiting.ip_address, waiting.execution_time) == (None, None, None)


@pytest.mark.parametrize(
    "error",
    [NASTY, '{"json": [1, "\\u0041"]}', "\u2028 \x1b[31m \x7f", "𝒳" * 10_000, "a" * 65_536, ""],
)
def test_any_error_text_is_stored_as_it_is(store: Store, claims: Claims, error: str) -> None:
    made = add(store)
    claims.settle([Settlement(one, "fail", error=error) for one in claims.claim([entry(made)])])
    assert read(store, made.id).error == error


def test_a_whole_chunk_of_long_errors_is_settled(store: Store, claims: Claims) -> None:
    made = [task(store, key="k" if n == 150 else None) for n in range(200)]
    store.tasks.insert_many(made)
    error = ("时'\\" * 13_107)[:32_768]  # 64 KB, and twice that size after both layers quote it
    claimed = claims.claim([entry(one) for one in made])
    assert claims.settle([Settlement(one, "fail", error=error) for one in claimed]) == {
        one.id for one in made
    }
    assert {read(store, one.id).error for one in made[::50]} == {error}


def test_one_statement_carries_a_bounded_text(
    store: Store, claims: Claims, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [task(store) for _ in range(30)]
    store.tasks.insert_many(made)
    claimed = claims.claim([entry(one) for one in made])
    sizes: list[int] = []

    def note(rows: Any) -> str:
        text = dump_json(rows)
        sizes.append(len(text.encode()))
        return text

    monkeypatch.setattr(settlements, "dump_json", note)
    assert (
        len(claims.settle([Settlement(one, "fail", error="时" * 65_536) for one in claimed])) == 30
    )
    assert len(sizes) == 3
    assert max(sizes) < 2_100_000


def test_a_claim_tells_what_its_rows_have_then(store: Store, claims: Claims) -> None:
    odd: list[dict[str, Any]] = [
        {},
        {"version": MOST_VERSIONS, "attempts": 2**31 - 1},
        {"key": "k", "attempts": 3},
    ]
    by_id = [
        put(store, Status.NOT_COMPLETE, expected_time=seconds(store.tasks.now(), -5), **fields)
        for fields in odd
    ]
    claimed = claims.claim([entry(one) for one in by_id])
    due = [
        put(store, Status.NOT_COMPLETE, expected_time=seconds(store.tasks.now(), -5), **fields)
        for fields in odd
    ]
    claimed += claims.claim_due("default", [0], 10)
    assert {one.id for one in claimed} == {one.id for one in by_id + due}
    told_later = ("update_time", "execution_time", "lease_until", "worker", "ip")
    for one in claimed:
        unsaid = {name: getattr(one, name) for name in told_later}
        assert replace(read(store, one.id), **unsaid) == one


def test_runs_that_end_differently_are_settled_the_same_together_and_one_by_one(
    store: Store, claims: Claims
) -> None:
    now = store.tasks.now()
    ends: list[dict[str, Any]] = [
        {"move": "succeed"},
        {"move": "succeed", "began": now, "result": '{"a":1}'},
        {"move": "fail", "began": seconds(now, -1), "error": "all\nof it"},
        {"move": "snooze", "began": now, "due": seconds(now, 60)},
        {"move": "schedule_retry", "began": now, "due": seconds(now, 30), "error": "again"},
        {"move": "give_back"},
        {"move": "expire", "error": "too late"},
    ]

    def left_by(settle: Callable[[list[Settlement]], object]) -> list[DelayTask]:
        made = [
            put(store, Status.NOT_COMPLETE, expected_time=seconds(now, -5), lapses=2) for _ in ends
        ]
        claimed = [row for one in made for row in claims.claim_alone(one.id, 0)]
        settle([Settlement(one, **end) for one, end in zip(claimed, ends, strict=True)])
        rows = [read(store, one.id) for one in made]
        # If the settlement has no start time, the attempt starts at its claim.
        same = {"id": 0, "create_time": now, "update_time": now}
        return [
            replace(row, **same, **({"execution_time": now} if n == 0 else {}))
            for n, row in enumerate(rows)
        ]

    together = left_by(lambda settlements: claims.settle(settlements))
    one_by_one = left_by(lambda settlements: [claims.settle([each]) for each in settlements])
    assert together == one_by_one
    assert [row.status.name for row in together] == [
        "DONE", "DONE", "FAILED", "NOT_COMPLETE", "NOT_COMPLETE", "NOT_COMPLETE", "CANCELLED",
    ]  # fmt: skip
    assert [row.execution_time for row in together[1:]] == [
        now,
        seconds(now, -1),
        now,
        now,
        None,
        None,
    ]
    assert [row.lapses for row in together] == [0, 0, 0, 0, 0, 2, 2]


@pytest.mark.parametrize("prepares", [True, False], ids=["prepared", "behind_a_pooler"])
@pytest.mark.parametrize("versions", [(4, 4, 4, 4), (4, 0, 7, 4)], ids=["one_version", "several"])
def test_rows_that_end_alike_are_found_by_their_versions_and_keep_their_own_beginnings(
    store: Store, versions: Sequence[int], prepares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not prepares:
        monkeypatch.setattr(store.database, "can", replace(store.database.can, prepare=False))
    claims, now = store.claims("worker-1", None), store.tasks.now()
    past = {"expected_time": seconds(now, -5)}
    made = [put(store, Status.NOT_COMPLETE, version=version, **past) for version in versions]
    waiting, running = (
        put(store, status, version=9, **past) for status in (Status.NOT_COMPLETE, Status.RUNNING)
    )
    claimed = claims.claim([*map(entry, made), entry(waiting)._replace(version=4)])
    assert {one.id for one in claimed} == {one.id for one in made}
    begins = {one.id: seconds(now, -n) for n, one in enumerate(made)}
    # The settlement of the last task has no start time.
    ends = [
        Settlement(one, "succeed", None if one.id == made[-1].id else begins[one.id])
        for one in claimed
    ]
    theirs = Settlement(replace(claimed[0], id=running.id), "succeed", now)
    assert claims.settle([*ends, theirs]) == begins.keys()
    done = [read(store, one.id) for one in made]
    assert [(row.status, row.version) for row in done] == [
        (Status.DONE, version + 2) for version in versions
    ]
    assert [row.execution_time for row in done[:-1]] == [begins[row.id] for row in done[:-1]]
    assert done[-1].execution_time >= now  # type: ignore[operator]
    assert read(store, running.id).status is Status.RUNNING


def test_a_stale_worker_cannot_settle_a_reclaimed_task(store: Store, claims: Claims) -> None:
    made = add(store)
    [old] = claims.claim([entry(made)])
    lapse_all(store, [made])
    assert claims.settle([Settlement(old, "succeed")]) == set()
    assert read(store, made.id).status is Status.NOT_COMPLETE
    assert len(store.claims("worker-2", None).claim_alone(made.id, 2)) == 1
    for move in ("succeed", "fail", "give_back"):
        assert claims.settle([Settlement(old, move)]) == set()
    found = read(store, made.id)
    assert (found.status, found.version, found.worker) == (Status.RUNNING, 3, "worker-2")


def test_a_give_back_is_not_mistaken_for_a_lapse(store: Store, claims: Claims) -> None:
    made = add(store)
    [old] = claims.claim([entry(made)])
    lapse_all(store, [made])
    assert claims.settle([Settlement(old, "give_back")]) == set()


def test_a_failure_is_not_mistaken_for_the_last_lapse(store: Store, claims: Claims) -> None:
    made = add(store)
    [old] = claims.claim([entry(made)])
    lapse_all(store, [made], max_lost_leases=1)
    assert read(store, made.id).status is Status.FAILED
    assert claims.settle([Settlement(old, "fail", error="mine")]) == set()


def test_settling_again_after_a_lost_answer_is_accepted_and_changes_nothing(
    store: Store, claims: Claims
) -> None:
    made, other = add(store), add(store)
    [one, two] = claims.claim([entry(made), entry(other)])
    assert claims.settle([Settlement(one, "succeed")]) == {made.id}
    assert claims.settle([Settlement(one, "succeed"), Settlement(two, "fail", error="x")]) == {
        made.id,
        other.id,
    }
    assert read(store, made.id).version == 2


def test_only_what_is_ours_in_a_chunk_is_settled(store: Store, claims: Claims) -> None:
    mine, theirs = add(store, key="a"), add(store, key="b")
    claimed = claims.claim([entry(mine), entry(theirs)])
    lapse_all(store, [theirs])
    assert claims.settle([Settlement(one, "succeed") for one in claimed]) == {mine.id}
    assert read(store, theirs.id).status is Status.NOT_COMPLETE


def test_succeeding_ends_the_row_of_lapses_and_giving_back_does_not(
    store: Store, claims: Claims
) -> None:
    made = add(store)
    lapse_all(store, claims.claim([entry(made)]))
    for move, lapses in (("give_back", 1), ("succeed", 0)):
        found = read(store, made.id)
        [claimed] = claims.claim_alone(found.id, found.version)
        assert claims.settle([Settlement(claimed, move)]) == {made.id}  # type: ignore[arg-type]
        assert read(store, made.id).lapses == lapses


# -- leases ---------------------------------------------------------------------------------------


def test_a_lease_is_renewed_for_what_these_processes_claimed(store: Store, claims: Claims) -> None:
    before, other = store.tasks.now(), store.claims("worker-2", None)
    mine, theirs = add(store), add(store)
    claims.claim([entry(mine)])
    other.claim([entry(theirs)])
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(update(t).values(lease_until=before))
    assert store.leases.renew(["worker-1"], before) == 1
    assert read(store, mine.id).lease_until > seconds(before, 59)  # type: ignore[operator]
    assert read(store, theirs.id).lease_until == before
    # A row that was claimed before this instant, and that the process lost, is not renewed.
    assert store.leases.renew(["worker-1"], seconds(store.tasks.now(), 1)) == 0
    assert store.leases.renew(["worker-2", "worker-3"], before) == 1
    # A lease is renewed if a process still runs the task and names it.
    later = seconds(store.tasks.now(), 1)
    assert store.leases.renew(["worker-1"], later, [mine.id, theirs.id]) == 1
    assert store.leases.renew(["worker-1"], before, [mine.id]) == 1


def test_a_renewed_lease_keeps_the_version_that_the_worker_holds(
    store: Store, claims: Claims
) -> None:
    before = store.tasks.now()
    claimed = claims.claim([entry(add(store))])
    store.leases.renew(["worker-1"], before)
    assert claims.settle([Settlement(one, "succeed") for one in claimed]) == {claimed[0].id}


@pytest.fixture
def owner(store: Store) -> Iterator[Connection]:
    """Yield a caller's transaction that stays open."""
    with store.database.tx.connect() as connection, connection.begin() as transaction:
        yield connection
        if transaction.is_active:
            transaction.rollback()


def has_row_locks(store: Store) -> bool:
    return store.database.url.get_backend_name() != "sqlite"  # one writer at a time


def test_leases_are_renewed_beside_a_row_that_somebody_has_locked(
    store: Store, claims: Claims, owner: Connection
) -> None:
    if not has_row_locks(store):
        return
    before = store.tasks.now()
    locked, free = add(store), add(store)
    claims.claim([entry(locked), entry(free)])
    store.tasks._moves.locked(owner, locked.id)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(store.leases.renew, ["worker-1"], before).result(3) == 1


@pytest.mark.parametrize("name", ["cancel", "reschedule", "retry"])
def test_a_move_that_is_refused_leaves_no_lock_in_the_callers_transaction(
    store: Store, claims: Claims, owner: Connection, name: str
) -> None:
    if not has_row_locks(store):
        return
    made = keyed(store)
    [claimed] = claims.claim([entry(made)])
    more = () if name == "cancel" else (made.expected_time,)
    for version in (None, 0):
        with pytest.raises(TaskStateError):
            getattr(store.tasks, name)(made.id, *more, version=version, on=owner)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(claims.settle, [Settlement(claimed, "succeed")]).result(3) == {made.id}


def test_a_settlement_waits_for_a_lock_only_for_a_while(
    store: Store, claims: Claims, owner: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_row_locks(store):
        return
    monkeypatch.setattr(database, "RETRY_FOR_S", 0)
    other = beside(store, store.database.url.render_as_string(hide_password=False))
    plain, key = add(store), keyed(store)
    claimed = other.claims("worker-2", None).claim([entry(plain), entry(key)])
    for one in claimed:
        store.tasks._moves.locked(owner, one.id)
    # One settlement stands alone, and one shares a transaction with its key.
    for one in claimed:
        with pytest.raises(StoreUnavailableError, match="stayed busy"):
            other.claims("worker-2", None).settle([Settlement(one, "succeed")])
    owner.get_transaction().rollback()  # type: ignore[union-attr]
    assert len(claims.settle([Settlement(one, "succeed") for one in claimed])) == 2
    other.close()


def test_our_connections_wait_briefly_and_lock_no_gaps(store: Store) -> None:
    backend, d = store.database.url.get_backend_name(), store.database
    asked = {
        "postgresql": ("SHOW lock_timeout", "SHOW transaction_isolation"),
        "mysql": ("SELECT @@innodb_lock_wait_timeout", "SELECT @@tx_isolation"),
        "sqlite": ("PRAGMA busy_timeout", "PRAGMA read_uncommitted"),
    }[backend]
    expected = {
        "postgresql": ("1s", "read committed"),
        "mysql": (1, "READ-COMMITTED"),
        "sqlite": (30000, 0),
    }[backend]
    for engine in (d.auto, d.tx):
        with engine.connect() as connection:
            assert tuple(connection.exec_driver_sql(one).scalar() for one in asked) == expected


def test_a_server_that_vanished_is_given_up_after_25_seconds(store: Store) -> None:
    if not has_row_locks(store) or not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    for engine in (store.database.auto, store.database.tx):
        with engine.connect() as connection:
            driver: Any = connection.connection.dbapi_connection
            number = (driver if hasattr(driver, "fileno") else driver._sock).fileno()
            with socket.socket(fileno=os.dup(number)) as line:
                assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000


def test_what_a_dead_process_held_lapses_at_once(store: Store, claims: Claims) -> None:
    mine, theirs = add(store, priority=3), add(store)
    [held] = claims.claim([entry(mine)])
    store.claims("worker-2", None).claim([entry(theirs)])
    lapsed = store.leases.release(["worker-1"], max_lost_leases=5)
    assert lapsed == Lapsed(1, [], levels={Level(mine.queue, 3)}), "and where they wait now"
    found = read(store, mine.id)
    assert (found.status, found.lapses, found.lease_until) == (Status.NOT_COMPLETE, 1, None)
    assert read(store, theirs.id).status is Status.RUNNING
    assert claims.settle([Settlement(held, "succeed")]) == set()


def test_a_task_that_lapses_too_often_in_a_row_is_failed(store: Store, claims: Claims) -> None:
    made = add(store)
    for lapses in (1, 2, 3):
        found = read(store, made.id)
        assert claims.claim_alone(found.id, found.version) != []
        assert lapse_all(store, [made], max_lost_leases=3) == 1
        found = read(store, made.id)
        assert found.lapses == lapses
        assert found.status is (Status.FAILED if lapses == 3 else Status.NOT_COMPLETE)
    assert "3 times in a row" in (found.error or "")
    assert found.attempts == 3


@pytest.mark.parametrize("name", ["lapse", "release"])
def test_a_task_that_is_given_up_leaves_its_key(store: Store, claims: Claims, name: str) -> None:
    made, other = keyed(store), add(store, key="free")
    claims.claim([entry(made), entry(other)])
    if name == "release":
        lapsed = store.leases.release(["worker-1"], max_lost_leases=1)
    else:
        t = store.schema.tasks
        with store.database.begin() as connection:
            connection.execute(update(t).values(lease_until=seconds(store.tasks.now(), -1)))
        lapsed = store.sweeps.lapse(1, 100)
    assert lapsed.total == 2
    assert {one.id for one in lapsed.given_up} == {made.id, other.id}
    assert store.tasks.id_of_key("mail", "order-1") is None
    assert keyed(store).id != made.id


def test_a_task_that_lapses_keeps_its_key(store: Store, claims: Claims) -> None:
    made = keyed(store)
    lapse_all(store, claims.claim([entry(made)]))
    assert store.tasks.id_of_key("mail", "order-1") == made.id


def test_a_key_that_went_to_another_task_is_kept_when_the_old_one_is_given_up(
    store: Store, claims: Claims
) -> None:
    made = keyed(store)
    claims.claim([entry(made)])
    new, _ = store.tasks.insert_keyed(task(store, key="order-1"), "replace")
    assert lapse_all(store, [made], max_lost_leases=1) == 1
    assert store.tasks.id_of_key("mail", "order-1") == new.id


def test_a_running_row_without_a_lease_lapses_a_lease_after_its_last_change(store: Store) -> None:
    old, new = (put(store, Status.RUNNING) for _ in range(2))
    t = store.schema.tasks
    with store.database.begin() as connection:
        changed = (
            update(t).where(t.c.id == old.id).values(update_time=seconds(store.tasks.now(), -61))
        )
        connection.execute(changed)
    assert store.sweeps.lapse(5, 100).total == 1
    assert read(store, old.id).status is Status.NOT_COMPLETE
    assert read(store, new.id).status is Status.RUNNING


def test_a_lease_that_still_lasts_does_not_lapse(store: Store, claims: Claims) -> None:
    claims.claim([entry(add(store))])
    assert store.sweeps.lapse(5, 100) == Lapsed(0, [])


def test_lapses_are_found_in_bounded_steps(store: Store, claims: Claims) -> None:
    claimed = claims.claim([entry(add(store)) for _ in range(5)])
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(update(t).values(lease_until=seconds(store.tasks.now(), -1)))
    assert [store.sweeps.lapse(5, 2).total for _ in range(4)] == [2, 2, 1, 0]
    assert len(claimed) == 5


# -- sweep ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sweep_partitions", [1, 2, 4])
def test_each_near_row_is_met_once_by_the_houses_together(
    store: Store, sweep_partitions: int
) -> None:
    now = store.tasks.now()
    dues = [seconds(now, 10 + n / 1000) for n in range(2500)]
    made = [
        task(store, expected_time=due, priority=n % 3, queue=f"q{n % 2}")
        for n, due in enumerate(dues)
    ]
    made += [
        replace(task(store), id=(1 << 60) + (n << 22), expected_time=seconds(now, 15))
        for n in range(100)
    ]
    store.tasks.insert_many(made)
    # Excluded rows: at the start of the window, after its end, in the past, and not waiting.
    add(store, expected_time=seconds(now, 5))
    add(store, expected_time=seconds(now, 31))
    add(store, -5.0)
    put(store, Status.CANCELLED, expected_time=seconds(now, 20))
    at_the_end = add(store, expected_time=seconds(now, 30))
    met: Counter[Entry] = Counter()
    for sweep_partition in range(sweep_partitions):
        mine: list[Entry] = []
        for some in store.sweeps.near(
            seconds(now, 5), seconds(now, 30), sweep_partition, sweep_partitions
        ):
            assert 0 < len(some) <= 1000
            mine += some
        assert [one.due_us for one in mine] == sorted(one.due_us for one in mine)
        assert len(mine) > len(made) / sweep_partitions / 2
        met.update(mine)
    assert met == Counter([entry(one) for one in (*made, at_the_end)])


def test_a_near_stream_may_be_left_half_read(store: Store) -> None:
    now = store.tasks.now()
    store.tasks.insert_many([task(store, expected_time=seconds(now, 10)) for _ in range(2500)])
    for _ in range(30):  # more calls than the pool has connections
        assert len(next(iter(store.sweeps.near(now, seconds(now, 30), 0, 1)))) == 1000


def test_levels_are_the_queues_and_priorities_with_late_rows(store: Store) -> None:
    assert store.sweeps.levels(1.0) == []
    late, early, soon = -5, 60, -0.1
    for queue, priority, due_s in (
        ("a", 0, late), ("a", 9, late), ("b", 3, late),
        ("b", 4, soon), ("c", 0, early), ("d", 1, late),
    ):  # fmt: skip
        for _ in range(3):
            add(store, due_s, queue=queue, priority=priority)
    put(store, Status.DONE, queue="e", due_s=-5)
    put(store, Status.RUNNING, queue="f", due_s=-5)
    assert store.sweeps.levels(1.0) == [Level("a", 9), Level("b", 3), Level("d", 1), Level("a", 0)]


def test_one_of_two_sweeps_at_once_is_let_through(store: Store) -> None:
    start = threading.Barrier(2)

    def sweep(_: int) -> bool:
        start.wait()
        return store.sweeps.begin_sweep(0, 1, 4.0) is not None

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(sweep, range(2))) == [
            False,
            True,
        ]  # the first sweep inserts the row
        s = store.schema.sweeps
        with store.database.begin() as connection:
            connection.execute(update(s).values(swept_at=seconds(store.tasks.now(), -5)))
        assert sorted(pool.map(sweep, range(2))) == [False, True]
    assert store.sweeps.begin_sweep(0, 1, 0.0) is not None
    assert store.sweeps.begin_sweep(0, 2, 4.0) is not None
    assert store.sweeps.begin_sweep(1, 2, 4.0) is not None


def test_a_clock_that_was_set_back_stops_no_sweep_and_what_it_armed_is_armed_again(
    store: Store,
) -> None:
    first = store.sweeps.begin_sweep(0, 1, 0.0)
    assert first is not None
    store.sweeps.mark_armed(0, 1, first, seconds(first, 3630))
    with store.database.begin() as connection:
        connection.execute(update(store.schema.sweeps).values(swept_at=seconds(first, 3600)))
    assert store.sweeps.stale_sweep_partitions(1, 10) == [0], (
        "nobody could say that it was not swept"
    )
    again = store.sweeps.begin_sweep(0, 1, 4.0)
    assert again is not None
    assert abs((store.tasks.now() - again).total_seconds()) < 5
    assert store.sweeps.stale_sweep_partitions(1, 10) == []
    assert store.sweeps.begin_sweep(0, 1, 4.0) is None


def test_a_sweep_goes_on_where_the_last_one_ended(store: Store) -> None:
    first = store.sweeps.begin_sweep(0, 1, 0.0)
    assert first is not None
    assert abs((store.tasks.now() - first).total_seconds()) < 5
    until = seconds(first, 30)
    store.sweeps.mark_armed(0, 1, first, until)
    assert store.sweeps.begin_sweep(0, 1, 0.0) == until


def test_a_sweep_does_not_overwrite_that_what_it_armed_was_forgotten_meanwhile(
    store: Store,
) -> None:
    first = store.sweeps.begin_sweep(0, 1, 0.0)
    assert first is not None
    store.sweeps.mark_armed(0, 1, first, seconds(first, 30))
    read = store.sweeps.begin_sweep(0, 1, 0.0)
    assert read is not None
    store.sweeps.forget_armed()
    store.sweeps.mark_armed(0, 1, read, seconds(read, 5))
    again = store.sweeps.begin_sweep(0, 1, 0.0)
    assert again is not None
    assert again <= store.tasks.now()


def test_forgetting_what_was_armed_goes_back_to_now_and_never_on(store: Store) -> None:
    first = store.sweeps.begin_sweep(0, 2, 0.0)
    assert first is not None
    second = store.sweeps.begin_sweep(1, 2, 0.0)
    assert second is not None
    past = seconds(first, -100)
    store.sweeps.mark_armed(0, 2, first, seconds(first, 30))
    store.sweeps.mark_armed(1, 2, second, past)
    store.sweeps.forget_armed()
    again = store.sweeps.begin_sweep(0, 2, 0.0)
    assert again is not None
    assert seconds(first, -1) <= again <= store.tasks.now()
    assert store.sweeps.begin_sweep(1, 2, 0.0) == past


def test_a_sweep_for_another_timer_begins_now_and_so_does_the_next_one_for_the_first(
    store: Store,
) -> None:
    eta, redis = store.sweeps, SweepQueries(store.database, store.schema, 60, "redis")
    for sweeps in (eta, redis, eta):
        since = sweeps.begin_sweep(0, 1, 0.0)
        assert since is not None
        assert abs((store.tasks.now() - since).total_seconds()) < 5, (
            "nothing is armed yet, as far as this one knows"
        )
        until = seconds(since, 30)
        sweeps.mark_armed(0, 1, since, until)
        assert sweeps.begin_sweep(0, 1, 0.0) == until


def test_purging_takes_old_finished_rows_in_small_steps(store: Store) -> None:
    old, new = seconds(store.tasks.now(), -1000), store.tasks.now()
    keep = []
    for status in Status:
        for created in (old, new):
            rows = [
                put(store, status, expected_time=created, create_time=created) for _ in range(2)
            ]
            if created == new or status not in FINISHED:
                keep += [one.id for one in rows]
    assert [store.sweeps.purge(500, 4) for _ in range(3)] == [4, 2, 0]
    left = {one.id for one in store.tasks.find(None, None, None, None, None, None, 100)}
    assert left == set(keep)


def test_purging_takes_the_keys_that_name_what_is_purged_and_no_others(store: Store) -> None:
    old = seconds(store.tasks.now(), -1000)
    finished, moved = keyed(store, create_time=old), add(store, create_time=old, key="moved")
    t, live = store.schema.tasks, task(store, key="moved")
    store.tasks.insert_keyed(live, "reject")
    # The live task has the tag of one purged task and the key of the other.
    other, _ = store.tasks.insert_keyed(
        task(store, tag="sms", key="moved", create_time=old), "reject"
    )
    # Another program finished these tasks and left their keys.
    with store.database.begin() as connection:
        done = update(t).where(t.c.id.in_([finished.id, moved.id, other.id]))
        connection.execute(done.values(status=int(Status.DONE), expected_time=old, update_time=old))
    assert store.sweeps.purge(500, 100) == 3
    assert store.tasks.id_of_key("mail", "order-1") is store.tasks.id_of_key("sms", "moved") is None
    assert store.tasks.id_of_key("mail", "moved") == live.id


# -- workers --------------------------------------------------------------------------------------


def test_a_worker_is_seen_until_it_is_gone(store: Store) -> None:
    store.workers.seen("w1", ["b", "a"], "prefork", 2, -1500)
    store.workers.seen("w2", [], "solo", 1, 0)
    [first, second] = store.workers.alive()
    assert (first["name"], first["queues"], first["pool"], first["concurrency"]) == (
        "w1",
        ["a", "b"],
        "prefork",
        2,
    )
    assert first["clock_offset_us"] == -1500
    store.workers.seen("w1", ["a"], "threads", 3, 7)
    again = store.workers.alive()[0]
    assert (again["queues"], again["pool"], again["started_at"]) == (
        ["a"],
        "threads",
        first["started_at"],
    )
    assert again["seen_at"] >= first["seen_at"]
    store.workers.gone("w1")
    assert [one["name"] for one in store.workers.alive()] == [second["name"]]


def test_a_silent_worker_is_buried_once(store: Store) -> None:
    store.workers.seen("w1", [], "solo", 1, 0)
    store.workers.seen("w2", [], "solo", 1, 0)
    w = store.schema.workers
    with store.database.begin() as connection:
        silent = update(w).where(w.c.name == "w1").values(seen_at=seconds(store.tasks.now(), -100))
        connection.execute(silent)
    assert store.workers.bury(60) == ["w1"]
    assert store.workers.bury(60) == []
    assert [one["name"] for one in store.workers.alive()] == ["w2"]


def test_a_worker_may_be_seen_by_two_of_its_threads_at_once(store: Store) -> None:
    start = threading.Barrier(4)

    def seen(_: int) -> None:
        start.wait()
        store.workers.seen("w1", [], "solo", 1, 0)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(seen, range(4)))
    assert len(store.workers.alive()) == 1


# -- other programs and missing tables ------------------------------------------------------------


def test_a_row_with_the_missions_columns_alone_is_a_good_task(store: Store, claims: Claims) -> None:
    table = store.schema.tasks.name
    with store.database.begin() as connection:
        connection.execute(
            text(
                f"INSERT INTO {table} (tag, message_body, status, version, delay_time, "
                "expected_time, create_time, update_time) "
                "VALUES ('mail', '{}', 0, 0, 5, :past, :past, :past)"
            ),
            {"past": seconds(store.tasks.now(), -60).strftime("%Y-%m-%d %H:%M:%S")},
        )
        connection.execute(text(f"INSERT INTO {table} (tag, message_body) VALUES ('least', '1')"))
    claimed = claims.claim_due("default", [0], 10)
    assert sorted(one.tag for one in claimed) == ["least", "mail"]
    assert all(one.id > 0 for one in claimed)
    assert claims.settle([Settlement(one, "succeed") for one in claimed]) == {
        one.id for one in claimed
    }


def test_missing_tables_are_named_with_the_remedy(database_url: str) -> None:
    store = open_store(database_url, table_prefix="gone_")
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    with pytest.raises(StoreError, match="delaytasks db upgrade"):
        store.tasks.get(1)
    store.close()


# -- the planner ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unanalysed(database_url: str) -> Iterator[Store]:
    """Yield many finished rows and some waiting rows that the statistics do not include."""
    store = open_store(database_url, table_prefix="plan_")
    now = store.tasks.now()
    rows = [
        task(store, expected_time=seconds(now, n - 9000), priority=n % 2) for n in range(10_000)
    ]
    t = store.schema.tasks
    if store.database.url.get_backend_name() == "postgresql":
        with store.database.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {t.name} SET (autovacuum_enabled = off)")
    store.tasks.insert_many(rows)
    with store.database.begin() as connection:
        connection.execute(
            update(t).where(t.c.expected_time < seconds(now, -100)).values(status=int(Status.DONE))
        )
    yield store
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    store.close()


@pytest.fixture(scope="module")
def analysed(database_url: str) -> Iterator[Store]:
    """Yield many finished and many waiting rows with statistics.

    The statistics do not relate columns: here all finished rows are in the past, and nearly all
    waiting rows are not.
    """
    store = open_store(database_url, table_prefix="plan_")
    now = store.tasks.now()
    store.tasks.insert_many(
        [task(store, expected_time=seconds(now, n - 10_000)) for n in range(30_000)]
    )
    t = store.schema.tasks
    with store.database.begin() as connection:
        connection.execute(
            update(t).where(t.c.expected_time < seconds(now, -100)).values(status=int(Status.DONE))
        )
    with store.database.auto.connect() as connection:
        words = "ANALYZE TABLE" if store.database.url.get_backend_name() == "mysql" else "ANALYZE"
        connection.exec_driver_sql(f"{words} {t.name}")
    yield store
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    store.close()


run_prepared = Prepared.__call__


def plans(store: Store, work: Callable[[], object]) -> str:
    """Return the query plan of each statement of `work`."""
    seen: list[tuple[str, Any]] = []

    def note(
        _c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool
    ) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "UPDATE", "WITH")):
            seen.append((statement, parameters))

    def note_prepared(self: Prepared, on: Connection, values: Mapping[str, Any]) -> Any:
        if self._link(on) is not None:
            _, execute, names, constants = self._texts
            seen.append((execute, tuple({**constants, **values}[name] for name in names)))
        return run_prepared(self, on, values)

    for engine in (store.database.auto, store.database.tx):
        event.listen(engine, "before_cursor_execute", note)
    with mock.patch.object(Prepared, "__call__", note_prepared):
        work()
    for engine in (store.database.auto, store.database.tx):
        event.remove(engine, "before_cursor_execute", note)
    words = {"sqlite": "EXPLAIN QUERY PLAN "}.get(store.database.url.get_backend_name(), "EXPLAIN ")
    found: list[Any] = []
    for sql, given in seen:
        # Use a connection that keeps the plan of a prepared statement.
        with store.database.auto.connect() as connection:
            if store.database.can.prepare:  # the others need a good plan without this
                connection.exec_driver_sql(
                    f"SET enable_seqscan = {'off' if sql.startswith('EXECUTE') else 'on'}"
                )
            found += [row._mapping for row in connection.exec_driver_sql(words + sql, given)]
            if store.database.can.prepare:
                connection.exec_driver_sql("SET enable_seqscan = off")
    if store.database.url.get_backend_name() == "mysql":
        # Leave out the possible keys, because only the key in use matters.
        return "\n".join(
            f"{row['type']} on {row['table']} using {row['key']}" for row in found if row["table"]
        )
    return "\n".join(str(row.get("QUERY PLAN") or row.get("detail")) for row in found)


def assert_no_scan(shown: str) -> None:
    # A scan of this index from its start only reads the first value.
    line = "(?!plan_yb_delay_waitlist using|plan_yb_delay_waitlist USING)"
    assert not re.search(
        rf"Seq Scan on plan_|SCAN {line}plan_|ALL on plan_|index on {line}plan_", shown
    ), shown


@pytest.mark.parametrize("versions", [1, 3], ids=["one_version", "several"])
def test_a_claim_by_id_uses_the_primary_key_on_empty_statistics(
    unanalysed: Store, versions: int
) -> None:
    store, claims = unanalysed, unanalysed.claims("w", None)
    found = store.tasks.find(None, Status.NOT_COMPLETE, None, None, None, None, 20).tasks
    some = [replace(one, version=n % versions) for n, one in enumerate(found)]
    shown = plans(store, lambda: claims.claim([entry(one) for one in some]))
    shown += plans(store, lambda: claims.settle([Settlement(one, "succeed") for one in some]))
    assert re.search(r"plan_yb_delay_task_message_pkey|INTEGER PRIMARY KEY|using PRIMARY", shown), (
        shown
    )
    assert "plan_idx" not in shown, shown
    assert_no_scan(shown)


def test_a_chunk_is_found_by_its_ids_where_statistics_know_of_no_row_that_waits_or_runs(
    database_url: str,
) -> None:
    """Without a kept plan, as with some poolers, the index of all waiting and running rows looks
    cheap."""
    store = open_store(database_url, table_prefix="stale_")
    backend, table = store.database.url.get_backend_name(), store.schema.tasks.name
    now, claimed = store.tasks.now(), list[DelayTask]()
    rows = [task(store, expected_time=seconds(now, n - 9000)) for n in range(4000)]
    with store.database.auto.connect() as connection:
        if backend == "postgresql":
            connection.exec_driver_sql(f"ALTER TABLE {table} SET (autovacuum_enabled = off)")
        store.tasks.insert_many([replace(row, status=Status.DONE) for row in rows[:2000]])
        connection.exec_driver_sql(
            f"{'ANALYZE TABLE' if backend == 'mysql' else 'ANALYZE'} {table}"
        )
    store.tasks.insert_many(rows[2000:])
    with mock.patch.object(store.database, "can", replace(store.database.can, prepare=False)):
        claims = store.claims("w", None)
        shown = plans(
            store, lambda: claimed.extend(claims.claim([entry(one) for one in rows[2000:2200]]))
        )
        shown += plans(
            store, lambda: claims.settle([Settlement(one, "succeed", now) for one in claimed])
        )
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    store.close()
    assert len(claimed) == 200
    assert re.search(r"_pkey|INTEGER PRIMARY KEY|using PRIMARY", shown), shown
    assert "idx_" not in shown, shown


def test_touching_finds_each_row_and_key_by_itself_on_empty_statistics(unanalysed: Store) -> None:
    store, later = unanalysed, seconds(unanalysed.tasks.now(), 5000)
    waiting = store.tasks.find(None, Status.NOT_COMPLETE, None, None, None, None, 1000).tasks
    ids = [one.id for one in waiting]
    keys = [f"k{n}" for n in range(10_000)]
    with store.database.begin() as connection:
        rows = [{"tag": "mail", "task_key": key, "task_id": ids[0]} for key in keys]
        connection.execute(insert(store.schema.keys), rows)
    for work in (
        lambda: store.touches.touch(ids[0], later),
        lambda: store.touches.touch_key("mail", "k1", later),
        lambda: store.touches.touch_many(ids, later),
        lambda: store.touches.ids_of_keys("mail", keys[:300]),
    ):
        shown = plans(store, work)
        assert "plan_idx" not in shown, shown
        assert_no_scan(shown)


def test_the_slow_path_uses_the_hot_index_on_empty_statistics(unanalysed: Store) -> None:
    store, claims = unanalysed, unanalysed.claims("w", None)
    for work in (
        lambda: store.sweeps.levels(1.0),
        lambda: claims.claim_due("default", [0, 1], 50),
        lambda: claims.claim_abandoned("default"),
        lambda: store.sweeps.lapse(5, 100),
    ):
        shown = plans(store, work)
        assert "plan_idx_yb_delay_hot" in shown, shown
        assert "plan_idx_expectedTime_status" not in shown, shown
        assert_no_scan(shown)


def test_the_slow_path_uses_the_hot_index_on_good_statistics(analysed: Store) -> None:
    store, claims = analysed, analysed.claims("w", None)
    for work in (
        lambda: store.sweeps.levels(1.0),
        lambda: store.sweeps.levels(1000.0),
        lambda: claims.claim_due("default", [0], 50),
        lambda: claims.claim_abandoned("default", [0]),
    ):
        shown = plans(store, work)
        assert "plan_idx_yb_delay_hot" in shown, shown
        assert "plan_idx_expectedTime_status" not in shown, shown
        assert_no_scan(shown)


def test_old_rows_are_found_by_their_time_on_good_statistics(analysed: Store) -> None:
    shown = plans(analysed, lambda: analysed.sweeps.purge(20_000, 100))
    assert "plan_idx_expectedTime_status" in shown, shown
    assert_no_scan(shown)


def test_the_few_of_a_status_or_key_are_found_without_reading_all_others_on_empty_statistics(
    unanalysed: Store,
) -> None:
    assert_finds_without_scan(unanalysed)


def test_the_few_of_a_status_or_key_are_found_without_reading_all_others_on_good_statistics(
    analysed: Store,
) -> None:
    assert_finds_without_scan(analysed)


def assert_finds_without_scan(store: Store) -> None:
    now = store.tasks.now()
    some = [task(store, expected_time=seconds(now, n - 5000), key=f"k{n}") for n in range(100)]
    t = store.schema.tasks
    with store.database.begin() as connection:
        # Other tests use the same table.
        connection.execute(t.delete().where(t.c.task_key.is_not(None)))
    store.tasks.insert_many(some)
    claims = store.claims("w", None)
    failed = claims.claim([entry(one) for one in some[:50]])
    claims.settle([Settlement(one, "fail", error="x") for one in failed])

    def find(status: Status | None, key: str | None, limit: int = 20) -> list[int]:
        return [
            one.id for one in store.tasks.find(None, status, key, None, None, None, limit).tasks
        ]

    assert find(Status.FAILED, None, 100) == [one.id for one in some[:50]]
    assert find(None, "k70") == find(Status.NOT_COMPLETE, "k70") == [some[70].id]
    for status in (
        Status.FAILED,
        Status.CANCELLED,
        Status.RUNNING,
        Status.HELD,
        Status.NOT_COMPLETE,
    ):
        shown = plans(store, lambda status=status: find(status, None))
        assert "plan_idx_expectedTime_status" not in shown, shown
        assert_no_scan(shown)
    shown = plans(store, lambda: find(None, "k70"))
    assert "plan_idx_yb_delay_key" in shown, shown
    assert_no_scan(shown)
    with store.database.begin() as connection:
        connection.execute(t.delete().where(t.c.task_key.is_not(None)))


def test_in_a_large_table_counts_are_those_of_the_planner(
    analysed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats, exact = Stats(analysed.database, analysed.schema), counted(analysed)
    assert {status: count.rows for status, count in stats.counts().items()} == exact
    monkeypatch.setattr(stats_module, "MAX_COUNTED", 1000)
    found = stats.counts()
    if analysed.database.url.get_backend_name() == "sqlite":
        assert not any(count.is_estimate for count in found.values())
        return
    assert found[Status.DONE].is_estimate
    assert found[Status.NOT_COMPLETE].is_estimate
    for status in (Status.DONE, Status.NOT_COMPLETE):
        assert exact[status] / 2 < found[status].rows < exact[status] * 2
    for status in (Status.FAILED, Status.CANCELLED, Status.HELD, Status.RUNNING):
        assert found[status] == (exact[status], False)


def test_due_rows_are_found_without_reading_those_that_wait(unanalysed: Store) -> None:
    if unanalysed.database.url.get_backend_name() != "postgresql":
        return  # the clocks of the other databases can be used with an index
    claims = unanalysed.claims("w", None)
    for work in (
        lambda: claims.claim_due("default", [0], 50),
        lambda: claims.claim_abandoned("default", [0]),
    ):
        assert re.search(r"Index Cond: .*expected_time\)? <", plans(unanalysed, work))


def test_the_sweep_reads_near_and_old_rows_by_their_time(unanalysed: Store) -> None:
    now = unanalysed.tasks.now()
    works: list[Callable[[], object]] = [
        lambda: list(unanalysed.sweeps.near(now, seconds(now, 30), 0, 1))
    ]
    # PostgreSQL reads such a small table as a whole.
    if unanalysed.database.url.get_backend_name() != "postgresql":
        works.append(lambda: unanalysed.sweeps.purge(60, 100))
    for work in works:
        shown = plans(unanalysed, work)
        assert "plan_idx_expectedTime_status" in shown, shown
        assert "plan_idx_yb_delay_hot" not in shown, shown
        assert_no_scan(shown)


def test_many_are_found_by_their_status_and_due_time_window_by_window(
    analysed: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, now = analysed, analysed.tasks.now()
    monkeypatch.setattr(store_bulk, "WINDOW", 500)
    for move in ("cancel", "reschedule", "retry"):
        status = "FAILED" if move == "retry" else "NOT_COMPLETE"
        for filters in (
            {"tag": "nobody"},
            {"status": status, "key_prefix": "x", "since": seconds(now, -5000)},
        ):
            windows = store.bulk.matching(filter_of(move, filters, False))
            shown = plans(store, lambda some=windows: list(itertools.islice(some, 2)))
            assert_no_scan(shown)
            used = re.findall("plan_idx_([a-z_]+)", shown.lower())
            # MySQL may use the other index if it estimates that a window is as narrow there.
            # PostgreSQL may read the few rows with a key inside a window.
            in_order = "expectedtime_status" if move == "retry" else "yb_delay_hot"
            assert used[0] == in_order, shown
            assert used.count(in_order) + used.count("yb_delay_key") >= 3, shown
            assert move != "retry" or "yb_delay_hot" not in used, shown


@pytest.mark.parametrize("move", ["cancel", "reschedule"])
def test_many_are_moved_by_their_ids_on_empty_statistics(unanalysed: Store, move: str) -> None:
    store, now = unanalysed, unanalysed.tasks.now()
    keyed = [
        store.tasks.insert_keyed(task(store, key=f"{move}{n}"), "reject")[0] for n in range(300)
    ]
    ids = [one.id for one in keyed]
    entry = AuditEntry(ids[0], move, {}, "me", "running", now, now, None, 300, 0, 0)
    store.bulk.begin(entry)
    to = None if move == "cancel" else timedelta(hours=1)
    shown = plans(
        store, lambda: store.bulk.step(entry.id, filter_of(move, {}, True), ids, to, (0, 0))
    )
    assert not re.search(
        r"Seq Scan on plan_yb_delay_task_m|SCAN plan_|(ALL|index) on plan_yb_delay_task_m", shown
    ), shown
    assert "plan_idx" not in shown, shown
    assert {read(store, id).version for id in ids} == {1}
