"""Workers read changed policies and miss no change: no late commit, no deletion, and no write of
an older release."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update

from delaytasks.core.clock import Clock
from delaytasks.core.events import Events
from delaytasks.core.policies import Changes, Policy, Stamp
from delaytasks.core.states import Status
from delaytasks.execution import policy_cache as engine_policies
from delaytasks.execution.policy_cache import PolicyCache
from delaytasks.maintenance.sweeper import APPLIED, PauseSweeper
from delaytasks.storage.inserts import ChangeNumbers
from delaytasks.storage.policy_rows import PolicyTable
from delaytasks.storage.store import Store
from delaytasks.storage.types import db_now_plus
from tests.conftest import settings_for
from tests.waiting import wait_until
from tests.world.broker import RecordingTimer

MANY = 3000


class TablePoller:
    """A process that reads policies and records the result of each read."""

    def __init__(self, store: Store) -> None:
        self.reads: list[Changes] = []
        self._table = store.policies
        self.cache = PolicyCache(self._read)

    def _read(self, since: int | None, checks: bool) -> Changes:
        self.reads.append(self._table.changes(since, checks))
        return self.reads[-1]

    def says(self, name: str, kind: str = "tag") -> Policy | None:
        self.cache.refresh()
        return next(
            (each for each in self.cache.known.all if (each.kind, each.name) == (kind, name)), None
        )


@pytest.fixture
def reader(store: Store) -> TablePoller:
    return TablePoller(store)


@pytest.fixture
def table(store: Store) -> PolicyTable:
    return store.policies


def write(store: Store, count: int, **values: Any) -> None:
    """Insert policies from before changes were counted."""
    rows = [
        {"kind": "tag", "name": f"p{number:05}", "is_paused": False, "concurrency": 5, "version": 1}
        | values
        for number in range(count)
    ]
    with store.database.begin() as connection:
        for start in range(0, count, 1000):
            connection.execute(insert(store.schema.policies), rows[start : start + 1000])


def set_limit(table: PolicyTable, name: str, concurrency: int | None) -> Policy:
    return table.set("tag", name, {"concurrency": concurrency}, "me")[0]


def test_a_read_returns_changed_policies_only(
    store: Store, table: PolicyTable, reader: TablePoller
) -> None:
    write(store, MANY)
    reader.cache.refresh()
    assert len(reader.reads[0].policies) == MANY == len(reader.cache.known.limited)
    reader.cache.refresh()
    assert reader.reads[1].policies == [], "nothing changed"
    set_limit(table, "p00007", 9)
    set_limit(table, "new", 1)
    assert reader.cache.refresh().limited["p00007"].concurrency == 9
    assert [len(read.policies) for read in reader.reads[2:]] == [2]
    assert len(reader.cache.known.limited) == MANY + 1


def test_a_change_that_is_committed_late_is_read_as_well(
    store: Store, table: PolicyTable, reader: TablePoller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later change of another policy must not become visible before this change."""
    set_limit(table, "first", 1)
    reader.cache.refresh()
    has_number, may_commit = threading.Event(), threading.Event()
    count = ChangeNumbers.next

    def dawdle(self: ChangeNumbers, on: Any, row: int) -> int:
        number = count(self, on, row)
        if threading.current_thread().name.startswith("slow"):
            has_number.set()
            assert may_commit.wait(30)
        return number

    monkeypatch.setattr(ChangeNumbers, "next", dawdle)
    with ThreadPoolExecutor(1, "slow") as slow, ThreadPoolExecutor(1) as quick:
        late = slow.submit(set_limit, table, "late", 2)
        assert has_number.wait(30)
        other = quick.submit(set_limit, table, "other", 3)
        for _ in range(20):
            if not other.done():
                reader.cache.refresh()
        may_commit.set()
        late.result(30)
        other.result(30)
    found = reader.cache.refresh().limited
    assert {name: policy.concurrency for name, policy in found.items()} == {
        "first": 1,
        "late": 2,
        "other": 3,
    }
    assert not any(read.is_whole for read in reader.reads[1:]), (
        "and nobody had to read all of them for that"
    )


def test_simultaneous_changes_are_all_read(table: PolicyTable, reader: TablePoller) -> None:
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            reader.cache.refresh()

    with ThreadPoolExecutor(5) as pool:
        reading = pool.submit(read)
        changes = [
            pool.submit(set_limit, table, f"t{number % 7}", number + 1) for number in range(60)
        ]
        for change in changes:
            change.result(60)
        done.set()
        reading.result(60)
    known = {
        policy.name: (policy.version, policy.concurrency) for policy in reader.cache.refresh().all
    }
    assert known == {policy.name: (policy.version, policy.concurrency) for policy in table.read()}
    assert reader.cache.stamp == table.changes(None, checks=True).stamp


def test_a_policy_that_was_cleared_is_read_as_such_and_deleted_much_later(
    table: PolicyTable, reader: TablePoller
) -> None:
    table.set("tag", "mail", {"is_paused": True}, "me")
    slow = reader.says("mail")
    assert slow is not None
    assert slow.is_paused
    table.applied([slow])
    cleared, _ = table.set("tag", "mail", {"is_paused": False}, "me")
    table.applied([cleared])
    assert table.read() == [], "nobody is shown it"
    assert not reader.cache.refresh().has_pauses
    assert not reader.cache.known.unapplied
    assert table.forget() == 0
    assert table.forget(older_than_s=-10) == 1
    assert table.changes(None, checks=False).policies == []
    table.set("tag", "mail", {"is_paused": True}, "me")
    assert reader.cache.refresh(checks=True).paused_tags == {"mail"}, "and it may come again"


def test_a_process_that_was_suspended_notices_a_deleted_policy(
    table: PolicyTable, reader: TablePoller, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.set("tag", "mail", {"is_paused": True}, "me")
    assert reader.cache.refresh().has_pauses
    cleared, _ = table.set("tag", "mail", {"is_paused": False}, "me")
    table.applied([cleared])
    assert table.forget(older_than_s=-10) == 1
    monkeypatch.setattr(engine_policies, "POLICY_CHECK_S", 0)
    assert not reader.cache.refresh().has_pauses


@pytest.mark.parametrize("how", ["update", "insert", "delete"])
def test_a_change_by_an_older_release_without_a_number_is_found_at_the_next_check(
    store: Store, table: PolicyTable, reader: TablePoller, how: str
) -> None:
    p = store.schema.policies
    table.set("tag", "mail", {"is_paused": how == "delete"}, "me")
    table.set("tag", "sms", {"concurrency": 1}, "me")
    child = TablePoller(store)
    child.cache.follow(reader.cache.refresh().stamp)
    with store.database.begin() as connection:
        if how == "delete":
            connection.execute(delete(p).where(p.c.name == "mail"))
        elif how == "update":
            connection.execute(
                update(p).where(p.c.name == "sms").values(is_paused=True, version=p.c.version + 1)
            )
        else:
            connection.execute(insert(p).values(kind="tag", name="new", is_paused=True, version=1))
    reader.cache.refresh(checks=True)
    paused = {"delete": set(), "update": {"sms"}, "insert": {"new"}}[how]
    assert reader.cache.known.paused_tags == paused
    child.cache.follow(reader.cache.stamp)
    assert child.cache.known.paused_tags == paused, "and so do the processes of its pool"


def test_a_pool_process_reads_only_changed_policies_and_only_if_needed(
    store: Store, table: PolicyTable
) -> None:
    write(store, MANY)
    main, child = TablePoller(store), TablePoller(store)
    child.cache.follow(main.cache.refresh().stamp)
    set_limit(table, "p00001", 77)
    stamp = main.cache.refresh().stamp
    for _ in range(3):
        child.cache.follow(stamp)
    assert [len(read.policies) for read in child.reads] == [MANY, 1]
    assert child.cache.known.limited["p00001"].concurrency == 77


def test_a_server_that_lacks_the_last_changes_is_read_as_a_whole(
    store: Store, table: PolicyTable, reader: TablePoller
) -> None:
    for number in range(1, 4):
        set_limit(table, "mail", number)
    reader.cache.refresh()
    p, c = store.schema.policies, store.schema.policy_changes
    with store.database.begin() as connection:
        connection.execute(update(c).values(number=2))
        connection.execute(update(p).values(concurrency=2, version=2, change_number=2))
    assert reader.cache.refresh().limited["mail"].concurrency == 2


def test_a_server_with_as_many_but_different_changes_is_detected(
    store: Store, table: PolicyTable, reader: TablePoller
) -> None:
    """After a failover that lost changes, the number, the count and the versions may be equal by
    chance."""
    set_limit(table, "mail", 1)
    set_limit(table, "sms", 1)
    before = reader.cache.refresh(checks=True).stamp
    p = store.schema.policies
    with store.database.begin() as connection:
        # SQLite counts milliseconds, so this time must differ from the time of the previous change.
        changed = {"concurrency": 2, "update_time": db_now_plus(1)}
        connection.execute(update(p).where(p.c.name == "mail").values(changed))
    assert reader.cache.refresh(checks=True).limited["mail"].concurrency == 2
    assert reader.cache.stamp != before
    child = TablePoller(store)
    child.cache.follow(pickle.loads(pickle.dumps(reader.cache.stamp)))
    assert child.cache.stamp == reader.cache.stamp


def test_a_check_reads_no_policy_while_nothing_changes(
    table: PolicyTable, reader: TablePoller
) -> None:
    set_limit(table, "mail", 1)
    set_limit(table, "sms", 1)
    table.applied(table.read())
    for _ in range(3):
        reader.cache.refresh(checks=True)
    assert [len(read.policies) for read in reader.reads] == [2, 0, 0]
    assert reader.reads[-1].stamp == reader.cache.stamp


def test_a_late_refresh_does_not_replace_the_newer_policies_of_another_thread(
    table: PolicyTable, reader: TablePoller
) -> None:
    set_limit(table, "mail", 1)
    reader.cache.refresh()
    set_limit(table, "mail", 2)
    old = table.changes(reader.cache.known.number, checks=False)
    set_limit(table, "mail", 3)
    read = reader.cache._read

    def overtaken(since: int | None, checks: bool) -> Changes:
        reader.cache._read = read
        reader.cache.refresh()
        return old

    reader.cache._read = overtaken
    assert reader.cache.refresh().limited["mail"].concurrency == 3


def test_without_policies_all_stamps_are_the_same(reader: TablePoller) -> None:
    assert reader.cache.refresh().stamp == Stamp()
    assert reader.cache.refresh(checks=True).stamp == Stamp()


class Walker:
    """The part of the sweep that applies policies."""

    def __init__(self, store: Store) -> None:
        settings = settings_for(store.database.url.render_as_string(hide_password=False))
        self.cache = PolicyCache(store.policies.changes)
        parts = (
            store.policies,
            store.paused_rows,
            Clock(store.tasks.now),
            RecordingTimer(),
            Events(),
        )
        self.paused_rows = PauseSweeper(settings, self.cache, *parts)
        self.beats = 0

    def walk(self) -> None:
        self.paused_rows.walk(self.paused_rows.cache.refresh(), self._beat)

    def _beat(self) -> None:
        self.beats += 1


def test_thousands_of_new_policies_are_applied_in_a_few_steps(
    store: Store, table: PolicyTable
) -> None:
    write(store, MANY)
    walker = Walker(store)
    walker.walk()
    assert all(policy.is_applied for policy in table.read())
    assert walker.beats >= MANY / APPLIED, "the loop shows that it goes on"
    assert table.changes(None, checks=False).number <= MANY / APPLIED
    assert not walker.cache.refresh().unapplied


@pytest.fixture
def paused(store: Store) -> Store:
    write(store, 40_000, is_paused=True)
    return store


def test_a_sweep_knows_near_rows_of_forty_thousand_paused_tags(paused: Store) -> None:
    """This is more than some drivers accept as parameters."""
    now = paused.tasks.now()
    rows = [
        {
            "tag": tag,
            "message_body": "{}",
            "expected_time": now + timedelta(seconds=10),
            "status": 0,
        }
        for tag in ("p00017", "mail", "p39999")
    ]
    with paused.database.begin() as connection:
        connection.execute(insert(paused.schema.tasks), rows)
        t = paused.schema.tasks
        ids = dict(connection.execute(select(t.c.tag, t.c.id)).all())
    policies = PolicyCache(paused.policies.changes).refresh()
    until = now + timedelta(seconds=60)
    [entries] = list(paused.sweeps.due_between(now, until, 0, 1, policies))
    assert [entry.id for entry in entries] == [ids["mail"]]
    held = paused.paused_rows.due_between(now, until)
    assert sorted(held) == sorted([ids["p00017"], ids["p39999"]])
    assert paused.paused_rows.hold(held) == 2
    wait_until(lambda: paused.tasks.get(ids["p00017"]).status is Status.HELD, 5, "the hold")  # type: ignore[union-attr]
