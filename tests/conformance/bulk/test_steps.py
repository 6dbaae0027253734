"""Bulk operations work in steps while workers run, and are recorded in the audit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, event, select, update

from delaytasks import BulkResult, DelayTasks, Status
from delaytasks.core.errors import (
    TaskNotFoundError,
)
from delaytasks.core.interfaces import Settlement
from delaytasks.runtime import runtime_of
from delaytasks.storage.database import Database
from delaytasks.storage.store import Store
from tests.conformance.bulk.bulk_tasks import NOON, counts, pass_a_moment, put, schedule, statuses
from tests.conformance.store_rows import RUNNING
from tests.proxy import Proxy
from tests.recording import delays_on, record
from tests.running import ROOT


@pytest.mark.usefixtures("small")
def test_a_bulk_call_works_in_small_steps_and_reports_each(delays: DelayTasks) -> None:
    at = runtime_of(delays).clock.now() + timedelta(days=1)
    tasks = [
        delays.schedule_at("mail", n, at) for n in range(5)
    ]  # all are due at the same instant, and exceed one window
    tasks += [schedule(delays, key=f"k{n}") for n in range(8)]
    seen: list[BulkResult] = []
    assert counts(delays.cancel_many(tag="mail", on_progress=seen.append)) == (13, 13, 0)
    assert [result.changed for result in seen] == [3, 6, 9, 12, 13]
    assert {result.matched for result in seen} == {13}
    assert set(statuses(delays, *tasks)) == {Status.CANCELLED}


@pytest.mark.usefixtures("small")
def test_no_transaction_moves_more_than_a_step_and_none_lasts_longer(
    store: Store, delays: DelayTasks
) -> None:
    for n in range(10):
        schedule(delays, key=f"k{n}" if n % 2 else None)
    moved: list[int] = []
    commits: list[int] = []

    def note(_c: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.lstrip().startswith("UPDATE s_yb_delay_task_message"):
            moved.append(cursor.rowcount)

    def committed(_connection: Connection) -> None:
        commits.append(sum(moved))

    tx = runtime_of(delays).store.database.tx
    event.listen(tx, "after_cursor_execute", note)
    event.listen(tx, "commit", committed)
    assert delays.cancel_many(tag="mail").changed == 10
    assert moved == [3, 3, 3, 1]
    assert commits[-4:] == [3, 6, 9, 10], "each of them is committed by itself"


@pytest.mark.usefixtures("small")
def test_the_audit_row_exists_from_the_start_and_shows_the_progress(
    store: Store, delays: DelayTasks
) -> None:
    for _ in range(8):
        schedule(delays)
    put(store, schedule(delays), **RUNNING)
    rows: list[tuple[str, int, int, int]] = []

    def look(_result: BulkResult) -> None:
        [entry] = delays.audit()
        rows.append((entry.state, entry.matched, entry.changed, entry.refused))

    result = delays.cancel_many(
        tag="mail", since=NOON - timedelta(days=9999), actor="ann@desk", on_progress=look
    )
    assert rows == [("running", 9, 3, 1), ("running", 9, 6, 1), ("running", 9, 8, 1)]
    [entry] = delays.audit()
    assert (entry.id,) == result.runs
    assert (entry.action, entry.actor, entry.state) == ("cancel", "ann@desk", "done")
    assert entry.filter == {"tag": "mail", "since": (NOON - timedelta(days=9999)).isoformat()}
    assert (entry.matched, entry.changed, entry.refused) == counts(result)
    assert entry.finished_at is not None
    assert entry.started_at == result.started <= min(entry.finished_at, entry.seen_at)
    delays.reschedule_many(by=-60, everything=True)
    newest, _ = delays.audit()
    assert newest.filter == {"everything": True, "to": "-60.0 s"}
    assert "@" in newest.actor
    assert [one.id for one in delays.audit(limit=1)] == [newest.id]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt, "stopped"), (ZeroDivisionError, "failed")]
)
def test_a_stopped_bulk_call_is_in_the_audit_and_continues_when_it_is_called_again(
    delays: DelayTasks, error: type[BaseException], state: str
) -> None:
    for _ in range(8):
        schedule(delays)

    def stop(_result: BulkResult) -> None:
        raise error

    with pytest.raises(error):
        delays.cancel_many(tag="mail", on_progress=stop)
    assert [(one.state, one.changed) for one in delays.audit()] == [(state, 3)]
    assert delays.audit()[0].finished_at is not None
    assert counts(delays.cancel_many(tag="mail")) == (5, 5, 0)


DIES = """
import os, sys
from delaytasks.operations import bulk
from tests.recording import delays_on
bulk.BULK_ROWS = 3
delays = delays_on(sys.argv[1], table_prefix="s_")
delays.cancel_many(tag="mail", on_progress=lambda result: \
result.changed == 6 and os.kill(os.getpid(), 9))
"""


def test_the_audit_shows_a_run_that_died_and_the_next_run_continues_it(
    delays: DelayTasks, database_url: str
) -> None:
    for n in range(10):
        schedule(delays, key=f"k{n}")
    died = subprocess.run(
        [sys.executable, "-c", DIES, database_url],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert died.returncode == -9
    [entry] = delays.audit()
    assert (entry.state, entry.matched, entry.changed, entry.finished_at) == (
        "running",
        10,
        6,
        None,
    )
    assert len(delays.find(status="CANCELLED")) == 6
    assert counts(delays.cancel_many(tag="mail")) == (4, 4, 0)
    assert [one.state for one in delays.audit()] == ["done", "running"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("verb", ["cancel", "reschedule"])
def test_a_step_whose_answer_was_lost_is_counted_and_not_done_again(
    store: Store, verb: str
) -> None:
    url = store.database.url
    if url.host is None:
        return  # SQLite has no network answer that could be lost
    proxy = Proxy(url.host, url.port or {"postgresql": 5432, "mysql": 3306}[url.get_backend_name()])
    proxied = delays_on(proxy.url(url.render_as_string(hide_password=False)), table_prefix="s_")
    timer = record(proxied)
    tasks = [schedule(proxied, key=f"k{n}") for n in range(5)]
    timer.disarmed.clear()

    def cut(result: BulkResult) -> None:
        if result.changed == 3:
            proxy.cut_answer(rb"COMMIT(?!TED)")

    pass_a_moment(proxied)
    if verb == "cancel":
        result = proxied.cancel_many(tag="mail", on_progress=cut)
    else:
        result = proxied.reschedule_many(by=60, tag="mail", on_progress=cut)
    assert proxy.cut == 1
    assert counts(result) == (5, 5, 0)
    [entry] = proxied.audit()
    assert (entry.changed, entry.refused, entry.state) == (5, 0, "done")
    assert {store.tasks.read(task.id).version for task in tasks} == {1}
    if verb == "reschedule":
        assert {
            (store.tasks.read(t.id).expected_time - t.expected_time).total_seconds() for t in tasks
        } == {60}
    assert len(timer.disarmed) == 5
    proxied.close()
    proxy.close()


# -- concurrent transactions ---------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("is_released", [True, False])
@pytest.mark.parametrize("locks", ["task", "key"])
def test_a_bulk_call_skips_locked_rows_and_tries_them_once_more(
    store: Store, delays: DelayTasks, is_released: bool, locks: str
) -> None:
    if store.database.url.get_backend_name() == "sqlite":
        return  # SQLite has one writer at a time
    tasks = [schedule(delays, key=f"k{n}") for n in range(7)]
    t, k = store.schema.tasks, store.schema.keys
    query = (
        select(t.c.id).where(t.c.id == tasks[1].id)
        if locks == "task"
        else select(k).where(k.c.task_key == "k1")
    )
    with store.database.tx.connect() as connection:
        connection.execute(query.with_for_update())

        def release(result: BulkResult) -> None:
            if is_released and result.changed == 6:
                connection.rollback()

        began = runtime_of(delays).clock.now()
        result = delays.cancel_many(tag="mail", on_progress=release)
        assert (runtime_of(delays).clock.now() - began).total_seconds() < 3, (
            "a lock would be waited for longer"
        )
    assert counts(result) == ((7, 7, 0) if is_released else (7, 6, 1))
    assert (delays.get(tasks[1]).status is Status.CANCELLED) is is_released
    assert delays.cancel_many(tag="mail").changed == (0 if is_released else 1)


def test_while_workers_run_each_task_is_run_or_cancelled_and_counted_once(
    store: Store, delays: DelayTasks
) -> None:
    tasks = [schedule(delays, delay=0, key=f"k{n}" if n % 3 == 0 else None) for n in range(400)]
    begun, is_over, ran = threading.Event(), threading.Event(), list[int]()

    def work(name: str) -> None:
        claims = store.claims(name, None)
        while True:
            claimed = claims.claim_due("default", [0], 7)
            begun.set()
            ran.extend(claims.settle([Settlement(task, "succeed") for task in claimed]))
            if not claimed and is_over.is_set():
                return

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(work, f"w{n}") for n in range(3)]
        assert begun.wait(10)
        result = delays.cancel_many(tag="mail")
        is_over.set()
        for worker in workers:
            worker.result(30)
    there = [delays.get(task) for task in tasks]
    assert {task.id for task in there if task.status is Status.DONE} == set(ran)
    assert len(ran) == len(set(ran))
    assert (
        sum(task.status is Status.CANCELLED for task in there)
        == result.changed
        == len(tasks) - len(ran)
    )
    assert result.matched == result.changed + result.refused
    with pytest.raises(TaskNotFoundError):
        delays.get(tag="mail", key="k0")


@pytest.mark.usefixtures("small")
def test_cancel_many_does_not_deadlock_with_callers_that_replace_the_same_keys(
    delays: DelayTasks,
) -> None:
    keys = [f"k{n}" for n in range(30)]
    is_over = threading.Event()

    def replace(backwards: bool) -> int:
        done = 0
        while not is_over.is_set():
            for key in reversed(keys) if backwards else keys:
                schedule(delays, key=key, on_conflict="replace")
                done += 1
        return done

    with ThreadPoolExecutor(2) as pool:
        replacing = [pool.submit(replace, backwards) for backwards in (False, True)]
        results = [delays.cancel_many(tag="mail") for _ in range(5)]
        is_over.set()
        assert all(each.result(30) for each in replacing)
    assert all(result.matched == result.changed + result.refused for result in results)
    live = list(delays.find(limit=1000, status="NOT_COMPLETE"))
    assert len(live) == len({task.key for task in live}), "one live task for each key"
    for task in live:
        assert delays.get(tag="mail", key=task.key).id == task.id


# -- bounds --------------------------------------------------------------------------------------


def test_old_audit_rows_are_purged_by_the_time_of_their_last_update(
    store: Store, delays: DelayTasks
) -> None:
    schedule(delays)
    delays.cancel_many(tag="mail")
    delays.cancel_many(tag="mail")
    old, _ = delays.audit()
    a = store.schema.audit
    with store.database.begin() as connection:
        connection.execute(
            update(a).where(a.c.id == old.id).values(seen_at=old.seen_at - timedelta(hours=2))
        )
    store.sweeps.purge_audit(7200 + 600)
    assert len(delays.audit()) == 2
    store.sweeps.purge_audit(3600)
    assert old.id not in [entry.id for entry in delays.audit()]
    assert len(delays.audit()) == 1


@pytest.mark.usefixtures("small")
def test_a_step_that_was_committed_before_an_interrupt_is_counted(
    delays: DelayTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may arrive at any moment."""
    for _ in range(5):
        schedule(delays)

    transaction = Database.transaction

    def stopped(database: Any, work: Any, *rest: Any, **options: Any) -> Any:
        answer = transaction(database, work, *rest, **options)
        if "Bulk.step" in work.__qualname__:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(Database, "transaction", stopped)
    with pytest.raises(KeyboardInterrupt):
        delays.cancel_many(tag="mail")
    monkeypatch.undo()
    [entry] = delays.audit()
    assert (entry.state, entry.changed) == ("stopped", 3)
