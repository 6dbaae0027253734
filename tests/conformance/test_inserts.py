"""Insert rows, on every database."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import String, cast, insert, select, text

from delaytasks import DelayedTask, DelayTasks, NewTask, StoreError
from delaytasks.core.filters import filter_of
from delaytasks.core.interfaces import Settlement
from delaytasks.core.states import Status
from delaytasks.storage import inserts as store_inserts
from delaytasks.storage import rows as store_rows
from delaytasks.storage.claims import Claims
from delaytasks.storage.row_lists import MAX_TEXT
from delaytasks.storage.store import Store
from tests.conformance.query_plans import plans
from tests.conformance.store_rows import NASTY, add, read, seconds, task
from tests.conftest import open_store
from tests.recording import counted
from tests.refusals import invalid
from tests.world import World
from tests.world.broker import RecordingTimer

# Rows that are inserted, on every database


def test_a_task_comes_back_as_it_was_written(store: Store) -> None:
    body = json.dumps({"text": NASTY}, ensure_ascii=False)
    made = add(store, 60.0, body_json=body, queue="q", priority=7, delay_s=60, limit_key="ä" * 255)
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


def test_many_tasks_are_written_in_one_statement(store: Store) -> None:
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
def test_tasks_that_differ_in_all_columns_are_the_same_inserted_together_or_singly(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_json: bool
) -> None:
    if is_json:
        database = store.tasks._insert_bulk._db
        monkeypatch.setattr(database, "can", replace(database.can, copy=False, binds_values=False))
    monkeypatch.setattr(store_inserts, "_BOUND_ROWS", 3)
    headers, long_s = '{"max_late_s":5}', 3_000_000_000
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
        task(store, 86400.25, tag="b'\"\\", body_json="null", priority=1, limit_key="it's \\ é"),
    ]
    made[1] = replace(made[1], create_time=seconds(store.tasks.now(), -60))
    twins = [replace(one, id=task(store).id) for one in made]
    assert store.tasks.insert_many(made)
    for twin in twins:
        assert store.tasks.insert(twin)
    assert [stored_as(store, one) for one in made] == [stored_as(store, twin) for twin in twins]


def stored_as(store: Store, task: DelayedTask) -> Sequence[Any]:
    """Return the columns as text.

    SQLite accepts a value of any type, and compares instants as text.
    """
    t = store.schema.tasks
    columns = [cast(column, String(1000)) for column in t.c if column.name != "id"]
    with store.database.begin() as connection:
        return connection.execute(select(*columns).where(t.c.id == task.id)).one()


def test_text_with_a_special_meaning_for_copy_is_written_unchanged(store: Store) -> None:
    bodies = (NASTY, "\\.", "\\N", "\r\n", "\\t", "a\x0bb\x0cc\x08")
    made = [task(store, tag=NASTY[:100], body_json=body) for body in bodies]
    assert store.tasks.insert_many(made)
    assert [read(store, one.id).body_json for one in made] == [one.body_json for one in made]
    assert {read(store, one.id).tag for one in made} == {NASTY[:100]}


def test_more_tasks_than_fit_in_one_statement_are_written(store: Store) -> None:
    made = [task(store, body_json=f"[{n}]") for n in range(450)]
    made[150] = task(store, body_json=json.dumps(["x" * MAX_TEXT]))
    assert store.tasks.insert_many(made)
    assert [read(store, made[n].id).body for n in (0, 199, 200, 449)] == [[0], [199], [200], [449]]
    assert counted(store)[Status.NOT_COMPLETE] == 450


def test_an_interrupt_during_a_copy_is_raised_and_no_row_is_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(task: DelayedTask) -> tuple[Any, ...]:
        if task is made[300]:
            raise KeyboardInterrupt
        return stored(task)

    plain, made = store_rows.PLAIN_COLUMNS, [task(store) for _ in range(400)]
    stored = store_rows._values[plain]
    monkeypatch.setitem(store_rows._values, plain, interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.tasks.insert_many(made)
    monkeypatch.undo()
    assert counted(store)[Status.NOT_COMPLETE] == 0
    assert store.tasks.insert_many(made)


@pytest.mark.slow
def test_many_large_tasks_are_written_in_one_call(store: Store) -> None:
    body = json.dumps('"' * 120_000)
    made = [task(store, body_json=f"[{n},{body}]") for n in range(100)]
    assert store.tasks.insert_many(made)
    assert counted(store)[Status.NOT_COMPLETE] == 100


def test_if_one_of_many_ids_exists_no_task_is_written(store: Store) -> None:
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
    assert len(store.tasks.find(filter_of({"tag": "mail"}), 10)) == 3


def test_a_row_with_only_the_required_columns_is_a_valid_task(store: Store, claims: Claims) -> None:
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
    store.schema.metadata.drop_all(store.database.tx)
    with pytest.raises(StoreError, match="delaytasks -A APP db upgrade"):
        store.tasks.get(1)
    store.close()


# Meta: pairs of strings that are stored with a task and found again, on each database


QUOTES = {"note": 'say "tenant":"acme" }', "z": "\\"}


def test_the_pairs_of_a_task_are_stored_and_read_again(delays: DelayTasks) -> None:
    pairs = {"tenant": "acme", "trace": "00-ab-01", "name": "Ä \U0001f600 \x00"}
    task = delays.schedule_delay("mail", {}, 60, meta=pairs)
    assert task.meta == delays.get(task).meta == pairs
    assert task.as_json()["meta"] == pairs
    assert delays.get(delays.schedule_delay("mail", {}, 60)).meta == {}
    assert delays.get(delays.schedule_delay("mail", {}, 60, meta={})).meta_json is None


def test_many_tasks_and_replacements_have_meta(delays: DelayTasks) -> None:
    delays.schedule_many(NewTask("mail", n, 60, meta={"n": str(n % 3)}) for n in range(9))
    assert len(delays.find(meta={"n": "1"})) == 3
    first = delays.schedule_delay("mail", 1, 60, key="k", meta={"v": "1"})
    options: Any = {"key": "k", "on_conflict": "replace"}
    assert delays.schedule_delay("mail", 2, 60, meta={"v": "2"}, **options).id == first.id
    assert delays.get(first).meta == {"v": "2"}


@pytest.mark.parametrize(
    ("meta", "wanted"),
    [
        ({"tenant": "acme"}, "acme both"),
        ({"tenant": "acme", "plan": "big"}, "both"),
        ({"plan": "big", "tenant": "acme"}, "both"),
        ({"tenant": "Acme"}, ""),
        ({"tenant": "acm"}, ""),
        ({"enant": "acme"}, ""),
        ({"tenant": 'ac"me'}, "odd"),
        (QUOTES, "quotes"),
        ({"note": QUOTES["note"]}, "quotes"),
        ({"z": "\\"}, "quotes"),
    ],
)
def test_tasks_are_found_by_pairs_exactly(
    delays: DelayTasks, meta: dict[str, str], wanted: str
) -> None:
    pairs: dict[str, Any] = {
        "none": None,
        "acme": {"tenant": "acme"},
        "both": {"tenant": "acme", "plan": "big", "a": ""},
        "odd": {"tenant": 'ac"me'},
        "quotes": QUOTES,
    }
    tasks = {name: delays.schedule_delay("mail", name, 60, meta=m) for name, m in pairs.items()}
    assert sorted(task.body for task in delays.find(meta=meta)) == sorted(wanted.split())
    assert delays.bulk.cancel(meta=meta).changed == len(wanted.split())
    cancelled = {name for name, task in tasks.items() if delays.get(task).is_finished}
    assert cancelled == set(wanted.split())
    if delays.bulk.log():
        assert delays.bulk.log(limit=1)[0].filter == {"meta": meta}


def test_the_processor_and_the_events_have_the_meta(world: World) -> None:
    seen: list[dict[str, str]] = []
    events: list[dict[str, Any]] = []
    world.delays.events.subscribe(lambda name, fields: events.append({"name": name, **fields}))

    def work(body: Any, task: DelayedTask) -> None:
        seen.append(task.meta)
        raise ValueError("no")

    world.delays.processor("mail")(work)
    task = world.schedule("mail", {}, meta={"t": "a"})
    world.run(task)
    assert seen == [{"t": "a"}]
    assert [e["name"] for e in events if e.get("meta") == {"t": "a"}] == [
        "task.scheduled",
        "task.failed",
    ]


@pytest.mark.parametrize(
    "meta",
    [
        "tenant",
        {"": "a"},
        {"a b": "c"},
        {"a": 1},
        {1: "a"},
        {"a": "x" * 513},
        {str(n): "x" for n in range(17)},
        {str(n): "x" * 512 for n in range(9)},
    ],
)
def test_meta_of_another_form_is_refused(delays: DelayTasks, meta: Any) -> None:
    with invalid("meta"):
        delays.schedule_delay("mail", {}, 60, meta=meta)
    assert len(delays.find()) == 0


@pytest.mark.parametrize("stored", ["", "{}", "[1]", "not JSON", '{"a": 1, "b": "c"}'])
def test_meta_that_another_program_stored_is_readable(
    store: Store, delays: DelayTasks, timer: RecordingTimer, stored: str
) -> None:
    row = {"tag": "mail", "message_body": "{}", "meta": stored}
    with store.database.begin() as connection:
        connection.execute(insert(store.schema.tasks).values(row))
    [task] = delays.find()
    assert task.meta == ({"b": "c"} if "b" in stored else {})
    assert len(delays.find(meta={"b": "c"})) == 0, "it has blanks, or no such pair"


#: The statement in docs/operations.md.
INDEX = (
    "CREATE INDEX idx_meta ON s_yb_delay_task_message USING gin "
    """(string_to_array(left(right(meta, -2), -2), '","')) WHERE meta IS NOT NULL"""
)


def test_the_index_of_the_documentation_serves_the_filter(store: Store, delays: DelayTasks) -> None:
    if not store.database.can.text_arrays:
        return  # the other databases read rows in the order of their due times
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    assert " ".join(INDEX.replace("s_yb", "yb").split()) in " ".join(page.split())
    delays.schedule_many(NewTask("mail", n, 60, meta={"tenant": f"t{n}"}) for n in range(5000))
    with store.database.auto.connect() as connection:
        connection.execute(text(INDEX))
        connection.execute(text("ANALYZE s_yb_delay_task_message"))
    shown = plans(store, lambda: store.tasks.find(filter_of({"meta": {"tenant": "t77"}}), 100))
    assert "idx_meta" in shown, shown
    assert [task.body for task in delays.find(meta={"tenant": "t77"})] == [77]
