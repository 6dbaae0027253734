"""Encrypted bodies and results in the table, on each database."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import insert, literal_column, select, text
from sqlalchemy.orm import Session

from delaytasks import BodyEncryptedError, DelayedTask, DelayTasks, NewTask, Status
from delaytasks.core.body import PREFIX, key_name
from delaytasks.core.interfaces import Entry
from delaytasks.core.text import NO_KEY
from delaytasks.runtime import runtime_of
from delaytasks.storage.store import Store
from delaytasks.worker.celery_tasks import processes_of
from tests.doc_pages import ROOT, blocks
from tests.recording import delays_on, new_key, record, run_now, runner_of, set_columns

OLD, NEW = new_key(), new_key()
BODY = {"card": "bOdY-cAnArY", "text": "tab\t\\ é 😀"}
Open = Callable[..., DelayTasks]


@pytest.fixture
def open_with(store: Store, database_url: str) -> Iterator[Open]:
    """Return a function that opens a process with the given keys."""
    made: list[DelayTasks] = []

    def open(*keys: str, **settings: Any) -> DelayTasks:
        made.append(
            delays_on(database_url, table_prefix="s_", encryption_keys=list(keys), **settings)
        )
        record(made[-1])
        return made[-1]

    yield open
    for delays in made:
        delays.close()


def stored(store: Store) -> list[tuple[str, str | None]]:
    """Return each body and result as the table stores them."""
    names: list[Any] = [literal_column("message_body"), literal_column("result")]
    with store.database.begin() as connection:
        query = select(*names).select_from(store.schema.tasks).order_by(store.schema.tasks.c.id)
        return [(row[0], row[1]) for row in connection.execute(query)]


def change(store: Store, task: DelayedTask, **values: Any) -> None:
    set_columns(store, "tasks", {"id": task.id}, **values)


def are_sealed(store: Store, key: str = NEW) -> bool:
    begin = f"{PREFIX}{key_name(key)}:"
    return all(
        body.startswith(begin) and (result or begin).startswith(begin)
        for body, result in stored(store)
    )


# -- encryption -----------------------------------------------------------------------------------


def one(delays: DelayTasks) -> None:
    delays.schedule_delay("mail", BODY, 60)


def with_a_key(delays: DelayTasks) -> None:
    delays.schedule_delay("mail", BODY, 60, key="k")


def replaced(delays: DelayTasks) -> None:
    delays.schedule_delay("mail", 1, 60, key="k")
    delays.schedule_delay("mail", BODY, 60, key="k", on_conflict="replace")


def in_bulk(delays: DelayTasks) -> None:
    delays.schedule_many(
        [NewTask("mail", BODY, 60 + n) for n in range(5)] + [NewTask("mail", BODY, 60, key="k")]
    )


def one_in_bulk(delays: DelayTasks) -> None:
    delays.schedule_many([NewTask("mail", BODY, 60)])


def in_a_session(delays: DelayTasks) -> None:
    with Session(runtime_of(delays).store.database.tx) as session, session.begin():
        delays.schedule_delay("mail", BODY, 60, session=session)
        delays.schedule_many([NewTask("mail", BODY, 60)] * 3, session=session)


def callback(delays: DelayTasks) -> None:
    delays.callbacks.post(
        "https://example.com/", BODY, 60, headers={"Authorization": "bOdY-cAnArY"}
    )


def message(delays: DelayTasks) -> None:
    delays.callbacks.publish("orders", BODY, 60)


def rescheduled_and_cancelled(delays: DelayTasks) -> None:
    delays.reschedule(delays.schedule_delay("mail", BODY, 60), 90)
    delays.cancel(delays.schedule_delay("mail", BODY, 60))


def failed_and_retried(delays: DelayTasks) -> None:
    delays.processor("fail", retries="1h")(lambda body: 1 / 0)
    run_now(delays, delays.schedule_delay("fail", BODY, 60))
    delays.processor("fail.once")(lambda body: 1 / 0)
    delays.rerun(run_now(delays, delays.schedule_delay("fail.once", BODY, 60)), 60)


def with_a_result(delays: DelayTasks) -> None:
    delays.processor("mail", keep_result=True)(lambda body: body)
    assert run_now(delays, delays.schedule_delay("mail", BODY, 60)).result == BODY


def with_a_result_of_its_own_transaction(delays: DelayTasks) -> None:
    def complete(body: Any, task: DelayedTask) -> None:
        with Session(runtime_of(delays).store.database.tx) as session, session.begin():
            task.complete(session, result=body)

    delays.processor("mail")(complete)
    assert run_now(delays, delays.schedule_delay("mail", BODY, 60)).result == BODY


WAYS_IN = [
    one,
    with_a_key,
    replaced,
    in_bulk,
    one_in_bulk,
    in_a_session,
    callback,
    message,
    rescheduled_and_cancelled,
    failed_and_retried,
    with_a_result,
    with_a_result_of_its_own_transaction,
]


@pytest.mark.parametrize("way_in", WAYS_IN, ids=lambda way: way.__name__)
def test_no_body_and_no_result_is_in_the_table_as_it_is(
    store: Store, open_with: Open, way_in: Callable[[DelayTasks], None]
) -> None:
    delays = open_with(NEW)
    way_in(delays)
    assert stored(store)
    assert are_sealed(store)
    assert "cAnArY" not in repr(stored(store))
    # The same body has a different ciphertext each time.
    assert len({body for body, _ in stored(store)}) == len(stored(store))
    assert all("cAnArY" in json.dumps(task.body) for task in delays.find())


def test_the_size_limit_is_that_of_the_plain_body_and_its_encrypted_text_is_stored(
    store: Store, open_with: Open
) -> None:
    delays, body = open_with(NEW), "😀" * 65_535 + "a" * 2
    delays.schedule_delay("mail", body, 60)
    delays.schedule_many([NewTask("mail", body, 60)] * 9)
    assert [task.body == body for task in delays.find()] == [True] * 10
    assert are_sealed(store)


def test_a_task_that_is_scheduled_again_after_an_unknown_outcome_is_the_same(
    open_with: Open,
) -> None:
    delays = open_with(NEW)
    id = delays.new_id()
    first = delays.schedule_delay("mail", BODY, 60, id=id)
    assert delays.schedule_delay("mail", BODY, 60, id=id).body_json == first.body_json


# -- decryption -----------------------------------------------------------------------------------


def test_processors_get_their_bodies_by_each_way_of_claiming(open_with: Open) -> None:
    delays, got = open_with(NEW), list[Any]()
    delays.processor("mail")(got.append)
    delays.processor("batch", batch=10)(lambda tasks: got.extend(task.body for task in tasks))
    delays.processor("limited")(got.append)
    delays.policies.set(tag="limited", concurrency=1)
    tasks = [
        delays.schedule_delay(tag, BODY, 0)
        for tag in ("mail", "batch", "batch", "limited", "limited")
    ]
    runner = runner_of(delays)
    runner.run([Entry(tasks[0].id, 0, 0)])
    assert got == [BODY]
    for _ in range(3):
        runner.run_due("default", [0], 100)
    assert got == [BODY] * 5
    assert {delays.get(task).status for task in tasks} == {Status.DONE}


def test_plain_and_encrypted_rows_can_be_read_from_one_table(store: Store, open_with: Open) -> None:
    before, got = open_with().schedule_delay("mail", [1], 0), list[Any]()
    delays = open_with(NEW)
    delays.schedule_delay("mail", [2], 0)
    with store.database.begin() as connection:  # as another program writes it
        connection.execute(insert(store.schema.tasks).values(tag="mail", message_body="[3]"))
    assert sorted(task.body for task in delays.find()) == [[1], [2], [3]]
    delays.processor("mail")(got.append)
    runner_of(delays).run_due("default", [0], 100)
    assert sorted(got) == [[1], [2], [3]]
    assert delays.get(before).status is Status.DONE


def test_old_keys_read_and_the_first_one_writes(store: Store, open_with: Open) -> None:
    old = open_with(OLD).schedule_delay("mail", BODY, 60)
    delays = open_with(NEW, OLD)
    assert delays.get(old).body == BODY
    new = delays.schedule_delay("mail", BODY, 60)
    assert open_with(NEW).get(new).body == BODY
    with pytest.raises(BodyEncryptedError, match=key_name(OLD)):
        _ = open_with(NEW).get(old).body


def test_the_statement_of_the_docs_counts_rows_by_key(store: Store, open_with: Open) -> None:
    [statement] = [
        block.text
        for block in blocks(ROOT / "docs/security.md")
        if block.language == "sql" and "encrypted_with" in block.text
    ]
    open_with(OLD).schedule_many([("mail", BODY, 60)] * 3)
    new = open_with(NEW, OLD)
    new.cancel(new.schedule_delay("mail", BODY, 60))
    new.schedule_delay("mail", BODY, 60)
    with store.database.begin() as connection:
        rows = connection.execute(text(statement.replace("yb_", "s_yb_"))).all()
    assert dict(map(tuple, rows)) == {f"aesgcm:{key_name(OLD)}": 3, f"aesgcm:{key_name(NEW)}": 1}


def test_plain_as_the_first_key_stores_plain_rows_and_reads_encrypted_ones(
    store: Store, open_with: Open
) -> None:
    task, delays = open_with(OLD).schedule_delay("mail", BODY, 60), open_with("plain", OLD)
    assert delays.get(task).body == BODY
    delays.cancel(delays.schedule_delay("mail", 5, 60))
    assert stored(store)[1][0] == "5"


# -- missing keys ---------------------------------------------------------------------------------


def test_without_the_key_a_task_is_deferred_and_does_not_fail(open_with: Open) -> None:
    task, got = open_with(NEW).schedule_delay("mail", BODY, 0), list[Any]()
    for keys in ((OLD,), ()):
        delays = open_with(*keys)
        delays.processor("mail")(got.append)
        assert runner_of(delays).run([Entry(task.id, delays.get(task).version, 0)]).claimed == 1
        found = delays.get(task)
        assert (found.status, found.runs, got) == (Status.NOT_COMPLETE, 0, [])
        assert found.error is not None
        assert found.error.startswith(NO_KEY + key_name(NEW))
        assert (found.expected_time - runtime_of(delays).clock.now()).total_seconds() > 4
        assert delays.events.counts["task.no_key"] == 1
        assert runtime_of(delays).store.deferred_rows.bring_forward(["mail"], None, 600) == []
        delays.reschedule(task.id, 0)


def test_a_worker_with_the_key_brings_forward_tasks_that_others_deferred(open_with: Open) -> None:
    task, got = open_with(NEW).schedule_delay("mail", BODY, 0), list[Any]()
    open_with(OLD).processor("mail")(got.append)
    delays = open_with(OLD)
    delays.processor("mail")(got.append)
    runner_of(delays).run([Entry(task.id, 0, 0)])
    rotated = open_with(OLD, NEW)
    rotated.processor("mail")(got.append)
    entries = runtime_of(rotated).store.deferred_rows.bring_forward(["mail"], None, 600)
    runner_of(rotated).run(entries)
    assert ([entry.id for entry in entries], got) == ([task.id], [BODY])


def test_an_unreadable_body_does_not_prevent_other_rows_from_running(open_with: Open) -> None:
    others, got = open_with(OLD), list[Any]()
    delays = open_with(NEW)
    delays.processor("batch", batch=10)(lambda tasks: got.extend(task.body for task in tasks))
    unread = [others.schedule_delay("batch", n, 0) for n in range(2)]
    late = others.schedule_delay("batch", 7, 0, max_late=1)
    change(runtime_of(delays).store, late, expected_time=late.expected_time.replace(year=2020))
    read = [delays.schedule_delay("batch", n, 0) for n in (2, 3)]
    report = runner_of(delays).run_due("default", [0], 100)
    assert (report.claimed, sorted(got)) == (5, [2, 3])
    assert [delays.get(task).status.name for task in unread + read] == ["NOT_COMPLETE"] * 2 + [
        "DONE"
    ] * 2
    assert delays.get(late).status is Status.CANCELLED


CHANGES: dict[str, Callable[[str], str]] = {
    "its end": lambda text: text[:-4] + "AAA=",
    "no token": lambda text: text[:16],
    "another letter": lambda text: text[:40] + "é" + text[41:],
    "no name": lambda text: PREFIX,
    "a short name": lambda text: text[:12] + text[15:],
    "a name that is none": lambda text: text[:7] + "ABCDEFGH" + text[15:],
    "no colon": lambda text: text[:15],
}


@pytest.mark.parametrize("change_token", CHANGES.values(), ids=CHANGES)
def test_a_changed_encrypted_body_fails_like_a_body_that_is_not_json(
    open_with: Open, change_token: Callable[[str], str]
) -> None:
    delays, got = open_with(NEW), list[Any]()
    delays.processor("mail")(got.append)
    task = delays.schedule_delay("mail", BODY, 0)
    change(
        runtime_of(delays).store,
        task,
        message_body=change_token(stored(runtime_of(delays).store)[0][0]),
    )
    runner_of(delays).run([Entry(task.id, 0, 0)])
    found = delays.get(task)
    assert (found.status, got) == (Status.FAILED, [])
    assert "BodyEncryptedError" in str(found.error)
    with pytest.raises(ValueError, match="was changed since"):
        _ = found.body


def test_an_unreadable_body_is_shown_as_encrypted(open_with: Open) -> None:
    delays = open_with(NEW)
    delays.processor("mail", keep_result=True)(lambda body: body)
    task = run_now(delays, delays.schedule_delay("mail", BODY, 60))
    found = open_with().get(task)
    shown = found.as_json()
    assert (shown["body"], shown["result"]) == (
        f"(encrypted with key {key_name(NEW)}, which can not read it here)",
    ) * 2
    with pytest.raises(
        BodyEncryptedError,
        match=f"the result of task {task.id} is encrypted with key {key_name(NEW)}",
    ):
        _ = found.result


def test_check_reads_bodies_for_schemas(open_with: Open) -> None:
    delays = open_with(NEW)

    def refuse(body: Any) -> None:
        if body == BODY:
            raise ValueError("no mail for cards")

    delays.processor("mail", schema=refuse)(lambda body: None)
    task = open_with(NEW).schedule_delay("mail", BODY, 60)
    [found] = delays.check()
    assert (found.ids, "no mail for cards" in found.problem) == ([task.id], True)


def test_check_distinguishes_a_damaged_body_from_a_missing_key(open_with: Open) -> None:
    delays = open_with(NEW)
    delays.processor("mail", schema=dict)(lambda body: None)
    damaged, stranger = (delays.schedule_delay("mail", BODY, 60) for _ in range(2))
    change(runtime_of(delays).store, damaged, message_body=f"{PREFIX}{key_name(NEW)}:gAAAAA")
    change(runtime_of(delays).store, stranger, message_body=f"{PREFIX}nonsense")
    found = {finding.problem: finding.ids for finding in delays.check()}
    assert found == {
        f"encrypted with key {key_name(NEW)}, "
        "which is here, and changed since, or another task's": [damaged.id],
        "begins with aesgcm: and names no key: no process can read it": [stranger.id],
    }


def test_monitors_see_no_bodies_that_are_encrypted(open_with: Open) -> None:
    for keys, is_shown in (((), True), ((NEW,), False)):
        delays = open_with(*keys)
        task = delays.schedule_delay("mail", BODY, 60)
        assert (
            "cAnArY" in repr(processes_of(runtime_of(delays).celery).task_events()._about(task))
        ) is is_shown


def test_check_names_tasks_whose_key_is_missing(open_with: Open) -> None:
    others = open_with(OLD)
    task = others.schedule_delay("mail", BODY, 60)
    others.cancel(others.schedule_delay("mail", BODY, 60))
    delays = open_with(NEW)
    delays.processor("mail", schema=dict)(lambda body: None)
    delays.schedule_delay("mail", BODY, 60)
    [found] = delays.check()
    assert (found.tag, found.tasks, found.ids) == ("mail", 1, [task.id])
    assert (
        found.problem == f"encrypted with key {key_name(OLD)}, "
        "which delaytasks_encryption_keys does not have here"
    )
    assert not list(open_with(NEW, OLD).check())[1:], "only that there is no processor"


# -- tokens copied to another row -----------------------------------------------------------------


def test_a_body_that_was_moved_to_another_row_does_not_run_there(
    store: Store, open_with: Open
) -> None:
    delays, got = open_with(NEW), list[Any]()
    delays.processor("mail")(got.append)
    tasks = [delays.schedule_delay("mail", n, 0) for n in range(3)]
    (first, _), (second, _), _ = stored(store)
    change(store, tasks[0], message_body=second)
    change(store, tasks[1], message_body=first)
    runner_of(delays).run_due("default", [0], 100)
    assert got == [2]
    found = [delays.get(task) for task in tasks]
    assert [task.status for task in found] == [Status.FAILED, Status.FAILED, Status.DONE]
    assert "belongs to another task" in str(found[0].error)
    change(store, tasks[0], message_body=first)
    delays.rerun(tasks[0], 0)
    runner_of(delays).run_due("default", [0], 100)
    assert got == [2, 0], "in its own row it can be read again"


def test_a_schema_check_names_a_body_that_was_moved(store: Store, open_with: Open) -> None:
    delays = open_with(NEW)
    delays.processor("mail", schema=lambda body: body)(lambda body: None)
    tasks = [delays.schedule_delay("mail", n, 60) for n in range(2)]
    change(store, tasks[0], message_body=stored(store)[1][0])
    [finding] = delays.check()
    assert finding.ids == [tasks[0].id]
    assert "another task's" in finding.problem
