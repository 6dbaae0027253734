"""Encrypted bodies and results in the table, on each database."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import literal_column, select, text
from sqlalchemy.orm import Session

from delaytasks import BodyEncryptedError, DelayedTask, NewTask, Status
from tests.doc_pages import ROOT, blocks
from tests.world import MakeWorld, World, key_name
from tests.world.recording import new_key

OLD, NEW = new_key(), new_key()
PREFIX = "aesgcm:"
BODY = {"card": "bOdY-cAnArY", "text": "tab\t\\ é 😀"}
Open = Callable[..., World]


@pytest.fixture
def open_with(make_world: MakeWorld) -> Open:
    """Return a function that opens a process with the given keys. `world` is one without keys."""
    return lambda *keys: make_world(encryption_keys=list(keys))


def stored(world: World) -> list[tuple[str, str | None]]:
    """Return each body and result as the table stores them."""
    names: list[Any] = [literal_column("message_body"), literal_column("result")]
    table = world.table()
    query = select(*names).select_from(table).order_by(table.c.id)
    return [(row[0], row[1]) for row in world.rows(query)]


def are_sealed(world: World) -> bool:
    begin = f"{PREFIX}{key_name(NEW)}:"
    texts = [text for row in stored(world) for text in row if text is not None]
    return all(text.startswith(begin) for text in texts)


# -- encryption -----------------------------------------------------------------------------------


def move(world: World) -> None:
    """Make moves that write rows again."""
    world.delays.reschedule(world.schedule("mail", BODY, 60), 90)
    world.cancel(world.schedule("mail", BODY, 60))
    world.delays.processor("retried", retries="1h")(lambda body: 1 / 0)
    world.delays.processor("failed")(lambda body: 1 / 0)
    for tag in ("retried", "failed"):
        world.run(failed := world.schedule(tag, BODY))
    world.delays.rerun(failed.id, 60)


def keep_results(world: World) -> None:
    def complete(body: Any, task: DelayedTask) -> None:
        with Session(world.engine) as session, session.begin():
            task.complete(session, result=body)

    world.delays.processor("own transaction")(complete)
    world.delays.processor("result", keep_result=True)(lambda body: body)
    for tag in ("own transaction", "result"):
        world.run(task := world.schedule(tag, BODY))
        assert world.read(task).result == BODY


def test_no_body_and_no_result_is_in_the_table_as_it_is(open_with: Open) -> None:
    world, new = open_with(NEW), NewTask("mail", BODY, 60)
    delays, callbacks = world.delays, world.delays.callbacks
    world.schedule("one", BODY, 60)
    for body in (1, BODY):
        world.schedule("replaced", body, 60, key="k", on_conflict="replace")
    for many in ([new], [new] * 5, [new._replace(key="k")]):
        delays.schedule_many(many)
    with Session(world.engine) as session, session.begin():
        world.schedule("session", BODY, 60, session=session)
        delays.schedule_many([new] * 3, session=session)
    callbacks.post("https://example.com/", BODY, 60, headers={"Authorization": "bOdY-cAnArY"})
    callbacks.publish("orders", BODY, 60)
    move(world)
    keep_results(world)
    assert are_sealed(world)
    assert "cAnArY" not in repr(stored(world))
    # The same body has a different ciphertext each time.
    assert len({body for body, _ in stored(world)}) == len(stored(world)) == 21
    assert all("cAnArY" in json.dumps(task.body) for task in delays.find())


def test_the_size_limit_is_of_the_plain_body_and_encrypted_text_is_stored(open_with: Open) -> None:
    world, body = open_with(NEW), "😀" * 65_535 + "a" * 2
    world.schedule("mail", body, 60)
    world.delays.schedule_many([NewTask("mail", body, 60)] * 9)
    assert [task.body == body for task in world.delays.find()] == [True] * 10
    assert are_sealed(world)


# -- decryption -----------------------------------------------------------------------------------


def test_processors_get_their_bodies_by_each_way_of_claiming(open_with: Open) -> None:
    world = open_with(NEW)
    got, delays = world.notes, world.delays
    delays.processor("batch", batch=10)(lambda tasks: got.extend(task.body for task in tasks))
    delays.processor("limited")(got.append)
    delays.policies.set(tag="limited", concurrency=1)
    tasks = [world.schedule(tag, BODY) for tag in "note batch batch limited limited".split()]
    world.run(tasks[0])
    assert got == [BODY]
    for _ in range(3):
        world.drain()
    assert got == [BODY] * 5
    assert {world.read(task).status for task in tasks} == {Status.DONE}


def test_plain_and_encrypted_rows_can_be_read_from_one_table(world: World, open_with: Open) -> None:
    plain, own = world.schedule(body=[1]), open_with(NEW)
    own.schedule(body=[2])
    world.insert("tasks", {"tag": "note", "message_body": "[3]"})
    own.advance(1)
    own.drain()
    assert sorted(own.notes) == [[1], [2], [3]]
    assert own.read(plain).status is Status.DONE
    again_plain = open_with("plain", NEW)
    again_plain.schedule(body=[4])
    assert sorted(task.body for task in again_plain.delays.find()) == [[1], [2], [3], [4]]
    assert sum(body.startswith(PREFIX) for body, _ in stored(world)) == 1


def test_old_keys_read_and_the_first_one_writes(open_with: Open) -> None:
    old, both = open_with(OLD).schedule(body=BODY), open_with(NEW, OLD)
    assert both.read(old).body == BODY
    assert open_with(NEW).read(both.schedule(body=BODY)).body == BODY
    with pytest.raises(BodyEncryptedError, match=key_name(OLD)):
        _ = open_with(NEW).read(old).body


def test_the_statement_of_the_docs_counts_rows_by_key(world: World, open_with: Open) -> None:
    [statement] = [
        block.text
        for block in blocks(ROOT / "docs/security.md")
        if block.language == "sql" and "encrypted_with" in block.text
    ]
    open_with(OLD).delays.schedule_many([("mail", BODY, 60)] * 3)
    new = open_with(NEW, OLD)
    new.cancel(new.schedule("mail", BODY, 60))
    new.schedule("mail", BODY, 60)
    rows = world.rows(text(statement.replace("yb_", "s_yb_")))
    assert dict(map(tuple, rows)) == {f"aesgcm:{key_name(OLD)}": 3, f"aesgcm:{key_name(NEW)}": 1}


# -- missing keys ---------------------------------------------------------------------------------


def test_without_the_key_a_task_is_deferred_and_does_not_fail(open_with: Open) -> None:
    task = open_with(NEW).schedule(body=BODY)
    for world in (open_with(OLD), open_with()):
        world.run(world.read(task))
        found = world.read(task)
        assert (found.status, found.runs, world.notes) == (Status.NOT_COMPLETE, 0, [])
        assert f"key={key_name(NEW)} (this worker has: " in str(found.error)
        assert found.expected_time > world.now() + timedelta(seconds=4)
        assert world.count("task.no_key") == 1
        world.delays.reschedule(task.id, 0)
        world.advance(1)


def test_an_unreadable_body_does_not_prevent_other_rows_from_running(open_with: Open) -> None:
    others, world = open_with(OLD), open_with(NEW)
    takes = world.delays.processor("batch", batch=10)
    takes(lambda tasks: world.notes.extend(task.body for task in tasks))
    unread = [others.schedule("batch", n) for n in range(2)]
    late = others.schedule("batch", 7, max_late=1)
    others.change(late, expected_time=late.expected_time.replace(year=2020))
    read = [world.schedule("batch", n) for n in (2, 3)]
    assert (world.drain().claimed, sorted(world.notes)) == (5, [2, 3])
    assert world.statuses(unread + read) == ["NOT_COMPLETE"] * 2 + ["DONE"] * 2
    assert world.read(late).status is Status.CANCELLED


#: Change the end of a token or a letter of it, or leave out the name of its key.
CHANGES: list[Callable[[str], str]] = [lambda text: text[:-4] + "AAA="]
CHANGES += [lambda text: text[:40] + "é" + text[41:], lambda text: PREFIX]


def test_a_changed_body_fails_as_bad_json(world: World, open_with: Open) -> None:
    own = open_with(NEW)
    tasks = [own.schedule(body=BODY) for _ in CHANGES]
    for task, change, (body, _) in zip(tasks, CHANGES, stored(world), strict=True):
        world.change(task, message_body=change(body))
    own.run(*tasks)
    for found in map(own.read, tasks):
        assert (found.status, own.notes) == (Status.FAILED, [])
        assert "BodyEncryptedError" in str(found.error)
        with pytest.raises(ValueError, match="was changed since"):
            _ = found.body


def test_an_unreadable_body_is_shown_as_encrypted(world: World, open_with: Open) -> None:
    own = open_with(NEW)
    own.delays.processor("mail", keep_result=True)(lambda body: body)
    own.run(task := own.schedule("mail", BODY))
    found = world.read(task)
    shown = found.as_json()
    unread = f"(encrypted with key {key_name(NEW)}, which cannot read it here)"
    assert shown["body"] == shown["result"] == unread
    says = f"the result of task {task.id} is encrypted with key {key_name(NEW)}"
    with pytest.raises(BodyEncryptedError, match=says):
        _ = found.result


def test_monitors_see_no_bodies_that_are_encrypted(open_with: Open) -> None:
    for keys, is_shown in (((), True), ((NEW,), False)):
        world = open_with(*keys)
        task = world.schedule("mail", BODY, 60)
        events = world.worker().processes.task_events()
        assert ("cAnArY" in repr(events._about(task))) is is_shown


def test_check_names_tasks_whose_bodies_cannot_be_decrypted(open_with: Open) -> None:
    lacking, world = open_with(OLD).schedule("mail", BODY, 60), open_with(NEW)
    world.delays.processor("mail", schema=dict)(lambda body: None)
    damaged = world.schedule("mail", BODY, 60)
    world.change(damaged, message_body=f"{PREFIX}{key_name(NEW)}:gAAAAA")
    [found] = world.delays.check()
    assert sorted(found.ids) == [lacking.id, damaged.id]
    assert f"encrypted with key {key_name(OLD)}, which" in found.problem


# -- tokens copied to another row -----------------------------------------------------------------


def test_a_body_that_was_moved_to_another_row_does_not_run(world: World, open_with: Open) -> None:
    own = open_with(NEW)
    own.delays.processor("mail", schema=lambda body: body)(own.notes.append)
    tasks = [own.schedule("mail", n) for n in range(3)]
    (first, _), (second, _), _ = stored(world)
    world.change(tasks[0], message_body=second)
    [finding] = own.delays.check()
    assert finding.ids == [tasks[0].id]
    assert "belongs to another task" in finding.problem
    world.change(tasks[1], message_body=first)
    own.drain()
    assert own.notes == [2]
    assert own.statuses(tasks) == ["FAILED", "FAILED", "DONE"]
    assert "belongs to another task" in str(own.read(tasks[0]).error)
    world.change(tasks[0], message_body=first)
    own.delays.rerun(tasks[0].id, 0)
    own.advance(1)
    own.drain()
    assert own.notes == [2, 0], "in its own row it can be read again"
