"""Rows that must be encrypted with another key, on each database."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import select

from delaytasks import DelayTasks, NewTask, Status
from delaytasks.core.encryption import key_name
from delaytasks.core.errors import BodyEncryptedError
from delaytasks.core.interfaces import Entry
from delaytasks.core.json_text import dump_json
from delaytasks.core.states import LIVE
from delaytasks.encryption import key_rotation as rotation
from delaytasks.encryption.key_rotation import Rotation
from delaytasks.storage.store import Store
from delaytasks.wiring import wiring_of
from tests.conformance.test_encryption import (
    BODY,
    NEW,
    OLD,
    Open,
    are_sealed,
    change,
    open_with,
    stored,
)
from tests.recording import run_now

pytestmark = pytest.mark.slow

__all__ = ["open_with"]
ALL = frozenset(Status)
OF_OLD, OF_NEW = key_name(OLD), key_name(NEW)


def rotate(delays: DelayTasks, statuses: frozenset[Status] = LIVE) -> tuple[int, int]:
    made = rotation_of(delays)
    made.rotate(statuses, lambda: None)
    return made.changed, made.unreadable


def rotation_of(delays: DelayTasks) -> Rotation:
    return Rotation(
        wiring_of(delays).store.database,
        wiring_of(delays).store.schema,
        wiring_of(delays).store.bulk,
    )


def moved(store: Store) -> list[Any]:
    """Return the columns that change when a row is moved."""
    t = store.schema.tasks.c
    with store.database.begin() as connection:
        return list(
            connection.execute(
                select(t.id, t.version, t.status, t.update_time, t.expected_time).order_by(t.id)
            )
        )


def test_rows_go_from_plain_to_a_key_to_the_next_one_and_back(
    store: Store, open_with: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "ROTATED_ROWS", 7)
    bodies = [{"n": n, "card": "cAnArY 😀"} for n in range(30)]
    open_with().schedule_many(
        [NewTask("mail", body, 60, priority=n % 3) for n, body in enumerate(bodies)]
    )
    before = moved(store)
    for keys, name in (((OLD,), OF_OLD), ((NEW, OLD), OF_NEW), (("plain", NEW), "")):
        delays = open_with(*keys)
        assert rotate(delays) == (30, 0)
        assert rotation_of(delays).needs(LIVE) == (Counter({name: 30}), Counter())
        assert sorted((task.body for task in delays.find()), key=lambda body: body["n"]) == bodies
        assert are_sealed(store, {OF_OLD: OLD, OF_NEW: NEW}.get(name, NEW)) is bool(name)
        assert rotate(delays) == (0, 0)
    assert moved(store) == before


def test_rotation_encrypts_finished_tasks_and_results_only_on_request(
    store: Store, open_with: Open
) -> None:
    old = open_with(OLD)
    old.processor("mail", keep_result=True)(lambda body: body)
    done = run_now(old, old.schedule_delay("mail", BODY, 60))
    old.schedule_delay("mail", BODY, 60)
    change(store, done, message_body="7")  # only the result needs the key
    delays = open_with(NEW, OLD)
    assert rotation_of(delays).needs(ALL) == (Counter({OF_OLD: 1}), Counter({OF_OLD: 1, "": 1}))
    assert rotate(delays) == (1, 0)
    assert rotation_of(delays).needs(ALL).finished == {OF_OLD: 1, "": 1}
    assert rotate(delays, ALL) == (1, 0)
    assert are_sealed(store)
    assert (open_with(NEW).get(done).body, open_with(NEW).get(done).result) == (7, BODY)


def test_rotation_leaves_and_counts_unreadable_bodies(store: Store, open_with: Open) -> None:
    open_with(OLD).schedule_delay("mail", BODY, 60)
    damaged = open_with(NEW).schedule_delay("mail", BODY, 60)
    change(store, damaged, message_body=f"fernet:{key_name(NEW)}:nonsense")
    other = open_with().schedule_delay("mail", BODY, 60)
    change(store, other, message_body="fernet:'; DROP")
    before, delays = stored(store), open_with("plain", NEW)
    assert rotate(delays) == (0, 3)
    assert stored(store) == before
    assert rotation_of(delays).needs(LIVE).live == {OF_OLD: 1, f"fernet:{OF_NEW}": 1, "?": 1}


def test_rotation_does_not_overwrite_a_body_that_was_replaced_meanwhile(
    store: Store, open_with: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = open_with(NEW)
    plain = open_with()
    for n in range(3):
        plain.schedule_delay("mail", n, 60, key=f"k{n}")
    found = Rotation._steps

    def replace_first(self: Rotation, *rest: Any) -> Any:
        plain.schedule_delay("mail", "replaced", 60, key="k1", on_conflict="replace")
        return found(self, *rest)

    monkeypatch.setattr(Rotation, "_steps", replace_first)
    assert rotate(delays) == (3, 0)
    assert [delays.get(tag="mail", key=f"k{n}").body for n in range(3)] == [0, "replaced", 2]
    assert are_sealed(store)


@pytest.mark.parametrize("column", ["message_body", "result"])
def test_a_row_that_changes_during_rotation_is_tried_once_more(
    store: Store, open_with: Open, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    """Rows are read and encrypted before they are locked."""
    tasks = [open_with().schedule_delay("mail", n, 60) for n in range(3)]
    delays, replace, left = open_with(NEW), Rotation._replace, list[Any]()

    def change_first(self: Rotation, sealed: Any) -> Any:
        if not left:
            change(store, tasks[1], **{column: '"changed"'})
        done = replace(self, sealed)
        left.append({row[0] for row, *_ in sealed} - done)
        return done

    monkeypatch.setattr(rotation, "RETRY_AFTER_S", 0)
    monkeypatch.setattr(Rotation, "_replace", change_first)
    assert rotate(delays) == (3, 0)
    assert left == [{tasks[1].id}, set()]
    found = delays.get(tasks[1])
    assert (found.body, found.result) == (
        ("changed", None) if column == "message_body" else (1, "changed")
    )
    assert are_sealed(store)


def test_rotation_skips_a_locked_row_and_tries_it_once_more(
    store: Store, open_with: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    if store.database.url.get_backend_name() == "sqlite":
        pytest.skip("it locks the whole database")
    task, other = (open_with().schedule_delay("mail", BODY, 60) for _ in range(2))
    delays, t = open_with(NEW), store.schema.tasks
    with store.database.begin() as somebody:
        somebody.execute(select(t.c.id).where(t.c.id == task.id).with_for_update()).all()
        monkeypatch.setattr(rotation.time, "sleep", lambda _: None)  # type: ignore[attr-defined]
        assert rotate(delays) == (1, 0)
        monkeypatch.setattr(rotation.time, "sleep", lambda _: somebody.commit())  # type: ignore[attr-defined]
        assert rotate(delays) == (1, 0)
    assert {delays.get(each).body_json for each in (task, other)} == {other.body_json}
    assert are_sealed(store)


@pytest.mark.parametrize("keys", [(NEW, OLD), ("plain", OLD)], ids=["to another key", "to none"])
def test_a_task_deferred_for_a_missing_key_is_brought_forward_after_rotation(
    open_with: Open, keys: tuple[str, ...]
) -> None:
    task = open_with(OLD).schedule_delay("mail", BODY, 0)
    worker = open_with(*(key for key in keys[:1] if key != "plain"))
    worker.processor("mail")(lambda body: None)
    worker.runner().run([Entry(task.id, 0, 0)])
    assert wiring_of(worker).store.deferred_rows.bring_forward(["mail"], None, 600) == []
    assert rotate(open_with(*keys)) == (1, 0)
    entries = wiring_of(worker).store.deferred_rows.bring_forward(["mail"], None, 600)
    worker.runner().run(entries)
    assert ([entry.id for entry in entries], worker.get(task).status) == ([task.id], Status.DONE)


# -- the earlier form without binding -------------------------------------------------------------


def unbind(store: Store, task: Any, key: str = OLD) -> str:
    """Write the row as an older version that did not bind tokens, and return its body."""
    token = f"fernet:{key_name(key)}:{Fernet(key).encrypt(dump_json(task.body).encode()).decode()}"
    change(store, task, message_body=token)
    return token


def test_rows_of_the_earlier_form_are_read_and_run(store: Store, open_with: Open) -> None:
    delays, got = open_with(OLD), list[Any]()
    delays.processor("mail")(got.append)
    task = delays.schedule_delay("mail", BODY, 0)
    unbind(store, task)
    assert delays.get(task).body == BODY
    assert list(delays.check()) == []
    delays.runner().run_due("default", [0], 100)
    assert (got, delays.get(task).status) == ([BODY], Status.DONE)


@pytest.mark.parametrize("keys", [(OLD,), (NEW, OLD)], ids=["the same key", "another key"])
def test_rotation_binds_unbound_texts_to_their_tasks(
    store: Store, open_with: Open, keys: tuple[str, ...]
) -> None:
    delays = open_with(*keys)
    tasks = [delays.schedule_delay("mail", n, 60) for n in range(3)]
    for task in tasks[:2]:
        unbind(store, task)
    needs = rotation_of(delays).needs(LIVE).live
    assert needs == {f"fernet:{OF_OLD}": 2, key_name(keys[0]): 1}
    assert rotate(delays) == (2, 0)
    assert rotation_of(delays).needs(LIVE).live == {key_name(keys[0]): 3}
    assert are_sealed(store, keys[0])
    (_, _), (second, _), _ = stored(store)
    change(store, tasks[0], message_body=second)
    with pytest.raises(BodyEncryptedError):
        _ = delays.get(tasks[0]).body
    assert [delays.get(task).body for task in tasks[1:]] == [1, 2]
    assert rotate(delays) == (0, 0), "nobody binds a token to the row that it was moved to"


def test_a_text_of_the_earlier_form_runs_on_no_worker_without_its_key(
    store: Store, open_with: Open
) -> None:
    task, other = (open_with(OLD).schedule_delay("mail", n, 0) for n in range(2))
    token = unbind(store, task)
    rotate(open_with(NEW, OLD))
    delays, got = open_with(NEW), list[Any]()
    delays.processor("mail")(got.append)
    change(store, other, message_body=token)
    delays.runner().run([Entry(other.id, 0, 0)])
    assert (got, delays.get(other).status) == ([], Status.NOT_COMPLETE)


def test_a_worker_with_the_key_brings_forward_both_forms(store: Store, open_with: Open) -> None:
    tasks = [open_with(OLD).schedule_delay("mail", n, 0) for n in range(2)]
    unbind(store, tasks[0])
    worker = open_with(NEW)
    worker.processor("mail")(lambda body: None)
    worker.runner().run([Entry(task.id, 0, 0) for task in tasks])
    [strange] = worker.check()
    assert strange.tasks == 2
    entries = wiring_of(open_with(OLD)).store.deferred_rows.bring_forward(["mail"], None, 600)
    assert sorted(entry.id for entry in entries) == sorted(task.id for task in tasks)
