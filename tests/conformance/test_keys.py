"""Keys, on every database: a tag has at most one live task with the same key."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import update

from delaytasks.core.errors import (
    DuplicateTaskError,
)
from delaytasks.core.filters import filter_of
from delaytasks.core.interfaces import Settlement
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.storage.claims import Claims
from delaytasks.storage.database import Database
from delaytasks.storage.store import Store
from tests.conformance.store_rows import (
    entry,
    keyed,
    read,
    task,
)

pytestmark = pytest.mark.quick


def test_a_live_key_rejects_and_names_the_one_that_has_it(store: Store) -> None:
    first = keyed(store)
    second = task(store, key="order-1")
    with pytest.raises(DuplicateTaskError, match="order-1") as caught:
        store.tasks.insert_keyed(second, "reject")
    assert caught.value.id == first.id
    assert store.tasks.get(second.id) is None
    assert store.tasks.id_of_key("mail", "order-1") == first.id


def test_keep_returns_the_live_task_of_the_key_unchanged(store: Store) -> None:
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


def test_a_key_whose_task_was_deleted_can_be_used_again(store: Store) -> None:
    first = keyed(store)
    with store.database.begin() as connection:
        connection.execute(store.schema.tasks.delete())
    assert keyed(store).id != first.id


def test_a_key_whose_task_another_program_finished_can_be_used_again(store: Store) -> None:
    first = keyed(store)
    with store.database.begin() as connection:
        connection.execute(update(store.schema.tasks).values(status=int(Status.DONE)))
    assert keyed(store).id != first.id


def test_a_rerun_takes_the_key_again_or_names_the_task_that_has_it(store: Store) -> None:
    first = keyed(store)
    store.tasks.cancel(first.id)
    store.tasks.rerun(first.id, store.tasks.now())
    assert store.tasks.id_of_key("mail", "order-1") == first.id
    store.tasks.cancel(first.id)
    second = keyed(store)
    with pytest.raises(DuplicateTaskError) as caught:
        store.tasks.rerun(first.id, store.tasks.now())
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
    assert len(store.tasks.find(filter_of({"tag": "mail"}), 10)) == 1


def test_a_key_names_its_only_live_task_during_concurrent_replacing_and_settling(
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
        for one in store.tasks.find(
            filter_of({"tag": "mail", "status": Status.NOT_COMPLETE, "key": "order-1"}), 100
        )
    ]
    assert live in ([], [store.tasks.id_of_key("mail", "order-1")])
