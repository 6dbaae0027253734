"""Insert rows, on every database."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from sqlalchemy import String, cast, select, text

from delaytasks import DelayTasks, NewTask, Status
from delaytasks.db import statements
from tests.world import NASTY, World
from tests.world.recording import ManualClock

# Rows that are inserted, on every database


def test_a_task_comes_back_as_it_was_written(world: World) -> None:
    options: dict[str, Any] = {"queue": "q", "priority": 7, "limit_key": "ä" * 255}
    made = world.schedule("mail", {"text": NASTY}, 60, **options)
    found = world.read(made)
    assert replace(found, update_time=None) == replace(made, update_time=None)
    assert found.body == {"text": NASTY}
    assert {name: getattr(found, name) for name in options} == options
    assert found.create_time == found.update_time == made.create_time
    assert found.expected_time.utcoffset() == timedelta(0)


BODIES = [NASTY, "\\.", "\\N", "", "\\\\n", "\t", "\r\n", "\\t", "a\x0bb\x0cc\x08", "😀", 2**62]


def test_more_tasks_than_fit_in_one_statement_are_written_with_any_text(world: World) -> None:
    at = world.now().replace(microsecond=250_000) + timedelta(days=1)
    bodies = [*BODIES, *(["x" * 200_000] if n % 40 == 0 else n for n in range(450))]
    times = [at + timedelta(minutes=n) for n in range(len(bodies))]
    new = (NewTask("mail", body, at=due) for body, due in zip(bodies, times, strict=True))
    assert world.delays.schedule_many(new) == len(bodies)
    found = world.delays.find(limit=1000)
    assert [task.body for task in found] == bodies
    assert [task.due for task in found] == times


@pytest.mark.parametrize("is_json", [False, True], ids=["best", "json"])
def test_tasks_are_the_same_inserted_together_or_singly(world: World, is_json: bool) -> None:
    if is_json:
        world.deny("copy")
    world.set_clock(ManualClock(world.now()))
    calls: list[tuple[Any, ...]] = [
        ("mail", {}, 0, {}),
        ("a", [1], 61.5, {"queue": "q", "priority": 9, "max_late": 5, "limit_key": "it's \\ é"}),
        ("b'\"\\", None, 86_400.25, {"priority": 1, "retries": "1m", "body_version": 2}),
    ]
    world.delays.schedule_many(NewTask(*call, **options) for *call, options in calls)
    for together, (*call, options) in zip(world.delays.find(), calls, strict=True):
        single = world.delays.schedule_delay(*call, **options)
        assert stored_as(world, single.id) == stored_as(world, together.id)


def stored_as(world: World, id: int) -> Sequence[Any]:
    """Return the columns as text.

    SQLite accepts a value of any type, and compares instants as text.
    """
    t = world.table()
    columns = [cast(column, String(1000)) for column in t.c if column.name != "id"]
    [row] = world.rows(select(*columns).where(t.c.id == id))
    return tuple(row)


def test_an_interrupt_during_a_copy_is_raised_and_no_row_is_written(world: World) -> None:
    made, values_of = [NewTask("mail", n, 60) for n in range(400)], statements._values_of
    ends = [KeyboardInterrupt if n == 300 else mock.DEFAULT for n in range(400)]
    interrupted = mock.patch.object(statements, "_values_of", side_effect=ends, wraps=values_of)
    with interrupted, pytest.raises(KeyboardInterrupt):
        world.delays.schedule_many(made)
    assert world.counted()[Status.NOT_COMPLETE] == 0
    assert world.delays.schedule_many(made) == 400


@pytest.mark.parametrize("is_session", [False, True])
def test_an_existing_id_stays_and_the_others_are_written(world: World, is_session: bool) -> None:
    old, large = world.schedule(body="old"), "x" * 240_000
    # Databases without COPY need several statements for this size.
    new = [NewTask("note", large, 60) for _ in range(9)] + [NewTask("note", 1, 60)] * 150
    new.append(NewTask("note", "other", 60, id=old.id))
    with world.begin() if is_session else nullcontext() as connection:
        session = {"session": connection} if is_session else {}
        world.delays.schedule_many(new, **session)
        world.delays.schedule_delay("note", 2, 60, id=old.id, **session)  # it is usable
        world.delays.schedule_delay("note", 2, 60, **session)
        if is_session:
            assert world.counted()[Status.NOT_COMPLETE] == 1
    assert world.counted()[Status.NOT_COMPLETE] == 161
    assert world.read(old).body == "old"


def test_a_tag_or_key_that_differs_in_case_or_accents_is_another_one(world: World) -> None:
    for tag, key in (("Mail", "k"), ("mail", "k"), ("mail", "K"), ("mail", "ḱ")):
        world.schedule(tag, key=key)
    assert len(world.delays.find(tag="mail")) == 3


def test_a_row_with_only_the_required_columns_is_a_valid_task(world: World) -> None:
    table = world.table().name
    with world.begin() as connection:
        connection.execute(
            text(
                f"INSERT INTO {table} (tag, message_body, status, version, delay_time, "
                "expected_time, create_time, update_time) "
                "VALUES ('mail', '{}', 0, 0, 5, :past, :past, :past)"
            ),
            {"past": (world.now() - timedelta(seconds=60)).strftime("%Y-%m-%d %H:%M:%S")},
        )
        connection.execute(text(f"INSERT INTO {table} (tag, message_body) VALUES ('least', '1')"))
    world.advance(1)
    claimed = world.claim_due()
    assert sorted(one.tag for one in claimed) == ["least", "mail"]
    assert all(one.id > 0 for one in claimed)
    assert world.worker().end(claimed) == {one.id for one in claimed}


# Meta: pairs of strings that are stored with a task and found again, on each database


QUOTES = {"note": 'say "tenant":"acme" }', "z": "\\"}


def test_the_pairs_of_a_task_are_stored_and_read_again(delays: DelayTasks) -> None:
    pairs = {"tenant": "acme", "trace": "00-ab-01", "name": "Ä \U0001f600 \x00"}
    task = delays.schedule_delay("mail", {}, 60, key="k", meta=pairs)
    assert task.meta == delays.get(task).meta == task.as_json()["meta"] == pairs
    assert delays.get(delays.schedule_delay("mail", {}, 60, meta={})).meta_json is None
    delays.schedule_many(NewTask("mail", n, 60, meta={"n": str(n % 3)}) for n in range(9))
    assert len(delays.find(meta={"n": "1"})) == 3
    options: Any = {"key": "k", "on_conflict": "replace", "meta": {"v": "2"}}
    assert delays.schedule_delay("mail", 2, 60, **options).id == task.id
    assert delays.get(task).meta == {"v": "2"}


ACME, BOTH = {"tenant": "acme"}, {"tenant": "acme", "plan": "big"}
FOUND = [(ACME, "acme both"), (BOTH, "both"), ({"plan": "big", "tenant": "acme"}, "both")]
FOUND += [({"tenant": "Acme"}, ""), ({"tenant": "acm"}, ""), ({"enant": "acme"}, "")]
FOUND += [({"tenant": 'ac"me'}, "odd"), (QUOTES, "quotes"), ({"z": "\\"}, "quotes")]
FOUND += [({"note": QUOTES["note"]}, "quotes")]


def test_tasks_are_found_by_pairs_exactly(delays: DelayTasks) -> None:
    pairs: dict[str, Any] = {"none": None, "acme": ACME, "both": {**BOTH, "a": ""}}
    pairs |= {"odd": {"tenant": 'ac"me'}, "quotes": QUOTES}
    tasks = {name: delays.schedule_delay("mail", name, 60, meta=m) for name, m in pairs.items()}
    for meta, wanted in FOUND:
        assert sorted(task.body for task in delays.find(meta=meta)) == wanted.split(), meta
        assert delays.bulk.cancel(meta=meta, dry_run=True).matched == len(wanted.split())
    assert delays.bulk.cancel(meta=ACME).changed == 2
    cancelled = {name for name, task in tasks.items() if delays.get(task).is_finished}
    assert cancelled == {"acme", "both"}
    assert delays.bulk.log(limit=1)[0].filter == {"meta": ACME}
