"""Adding and dropping partitions keeps all waiting, running and recently ended rows.

PostgreSQL only.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, insert, select, text

from delaytasks.core.errors import ConfigError
from delaytasks.core.ids import first_id, made_at
from delaytasks.core.interfaces import Settlement
from delaytasks.core.states import LIVE, Status
from delaytasks.core.task import DelayTask
from delaytasks.partitions import pruning
from delaytasks.partitions.conversion import convert
from delaytasks.partitions.pruning import Pruned
from delaytasks.partitions.table import Partitions, edge_after, periods
from delaytasks.storage.database import Database
from delaytasks.storage.partition_bounds import CHECK
from delaytasks.storage.rows import values_of
from tests.conformance.test_store import entry, plans, read, seconds, task
from tests.conftest import open_store
from tests.waiting import wait_until

WEEK, DAY = timedelta(days=7), timedelta(days=1)
PREFIX = "q_"
TASKS = PREFIX + "yb_delay_task_message"


def turns(partitions: Partitions, what: str, is_granted: bool) -> list[Any]:
    """Return `what` of each session that holds the partition lock, or waits for it."""
    query = f"""SELECT {what} FROM pg_locks WHERE locktype = 'advisory' AND granted = :is_granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND objid::bigint = hashtext(:name)::bigint & 4294967295"""
    with partitions.database.auto.connect() as connection:
        name = f"{partitions.tasks.fullname} {CHECK}"
        return list(
            connection.execute(text(query), {"name": name, "is_granted": is_granted}).scalars()
        )


def meet_others(partitions: Partitions, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the first change until `count` other sessions wait for the lock."""
    in_turn, calls = partitions.in_turn, itertools.count()

    def after_others_came(work: Callable[[Any], list[str]], *otherwise: str) -> list[str]:
        if next(calls) == 0:
            wait_until(
                lambda: len(turns(partitions, "pid", is_granted=False)) == count, 30, "the others"
            )
        return in_turn(work, *otherwise)

    monkeypatch.setattr(partitions, "in_turn", after_others_came)


class ConvertedTable:
    """A table that was converted ten weeks ago, with weekly partitions from the following week
    on."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url, table_prefix=PREFIX)
        self.partitions = Partitions(self.store.database, PREFIX)
        self.now = self.store.tasks.now()
        self.at(-10 * WEEK, lambda partitions: convert(partitions, WEEK, 14))
        self._count = 0

    def at(self, when: timedelta, work: Callable[[Partitions], Any]) -> Any:
        """Call `work` with a clock that is moved by `when`."""
        partitions = Partitions(self.store.database, PREFIX)
        partitions.now = lambda: self.now + when  # type: ignore[method-assign]
        return work(partitions)

    def put(
        self,
        age: timedelta,
        status: Status = Status.DONE,
        ended: timedelta | None = None,
        **row: Any,
    ) -> DelayTask:
        """Insert a row of the given age. It was due and last changed at that age, or at `ended`."""
        self._count += 1
        made = task(self.store, id=first_id(self.now - age) + self._count)
        touched = self.now - (age if ended is None else ended)
        values = {
            **values_of(made, self.store.schema),
            "status": int(status),
            "expected_time": touched,
            "update_time": touched,
            **row,
        }
        with self.store.database.begin() as connection:
            connection.execute(insert(self.store.schema.tasks).values(values))
        return replace(made, status=status, version=values["version"])

    def fill(self, count: int, when: datetime, status: Status) -> None:
        """Insert `count` rows that are due at `when`."""
        self.run(
            f"INSERT INTO {TASKS} (id, tag, message_body, status, expected_time, update_time) "
            f"SELECT {first_id(when) + 1000} + n, 'mail', '{{}}', {status:d}, '{when}', '{when}' "
            f"FROM generate_series(1, {count}) AS n"
        )

    def run(self, statement: str) -> list[Any]:
        with self.store.database.begin() as connection:
            result = connection.exec_driver_sql(statement)
            return list(result.all()) if result.returns_rows else []

    def rows(self) -> dict[int, tuple[str, Any]]:
        """Return the partition and all columns of each row."""
        found = self.run(f"SELECT tableoid::regclass::text AS place, * FROM {TASKS} ORDER BY id")
        return {row.id: (row.place.removeprefix(TASKS), row[1:]) for row in found}

    def places(self) -> list[str]:
        return [place for place, _ in self.rows().values()]

    def names(self) -> list[str]:
        return [part.name.removeprefix(TASKS) for part in self.partitions.all()]

    def drop(self, older_than: timedelta = 4 * WEEK, **options: Any) -> list[Pruned]:
        return list(pruning.prune(self.partitions, older_than, **options))

    @contextmanager
    def upon(self, words: str, one: DelayTask, work: Callable[[], object]) -> Iterator[None]:
        """Call `work` once, after the first statement that contains `words` and the partition of
        `one`."""
        place = self.rows()[one.id][0]

        def look(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if words in statement and TASKS + place in statement and not done:
                done.append(True)
                work()

        done: list[bool] = []
        engines = (self.store.database.auto, self.store.database.tx)
        for engine in engines:
            event.listen(engine, "after_cursor_execute", look)
        yield
        for engine in engines:
            event.remove(engine, "after_cursor_execute", look)
        assert done

    def close(self) -> None:
        for name in self.run(f"SELECT tablename FROM pg_tables WHERE tablename ~ '^{TASKS}_'"):
            self.run(f"DROP TABLE {name[0]}")
        with self.store.database.begin() as connection:
            self.store.schema.metadata.drop_all(connection)
        self.store.close()


@pytest.fixture
def field(postgresql_url: str) -> Iterator[ConvertedTable]:
    made = ConvertedTable(postgresql_url)
    yield made
    made.close()


# -- periods --------------------------------------------------------------------------------------


def test_partitions_meet_at_the_same_instants_whoever_makes_them_and_when() -> None:
    start = made_at(0)
    assert edge_after(start, WEEK) == start + WEEK
    assert edge_after(start + 3 * DAY, WEEK) == edge_after(start + 6.9 * DAY, WEEK) == start + WEEK
    assert periods(start + DAY, start + 3 * WEEK, WEEK) == [
        (start + DAY, start + WEEK),
        (start + WEEK, start + 2 * WEEK),
        (start + 2 * WEEK, start + 3 * WEEK),
    ]
    assert periods(start + WEEK, start + WEEK, WEEK) == []


def test_ids_of_an_instant_are_made_at_that_instant(field: ConvertedTable) -> None:
    now = seconds(field.now, 0).replace(microsecond=5000)
    assert made_at(first_id(now)) == now
    assert made_at(first_id(now) + 2**22 - 1) == now
    assert made_at(first_id(now) - 1) < now


# -- partitions ahead -----------------------------------------------------------------------------


def test_each_period_has_one_partition_and_the_first_all_before(field: ConvertedTable) -> None:
    *parts, default = field.partitions.all()
    assert default.is_default
    assert parts[0].since is None
    assert all(a.until == b.since for a, b in itertools.pairwise(parts))
    assert all(part.until - part.since == WEEK for part in parts[1:])  # type: ignore[operator]
    assert parts[-1].until == edge_after(field.now, WEEK) + 4 * WEEK
    field.put(DAY)
    field.put(10 * WEEK)
    assert field.places() == ["_first", f"_p{edge_after(field.now - DAY, WEEK) - WEEK:%Y%m%d}"]
    assert field.partitions.live() == {}


def test_partitions_are_made_once_however_many_ask_for_them(
    field: ConvertedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = field.names()
    assert field.partitions.extend(WEEK, 4) == []
    meet_others(field.partitions, 2, monkeypatch)
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda _: field.partitions.extend(WEEK, 8), range(3)))
    assert sorted(map(len, made)) == [0, 0, 4]
    assert len(field.names()) == len(before) + 4


def test_what_was_made_is_made_though_the_turn_was_lost(
    field: ConvertedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server or a pooler may close the connection that only holds the lock."""
    in_turn, ended = field.partitions.in_turn, []

    def and_then_it_is_lost(work: Callable[[Any], list[str]], *otherwise: str) -> list[str]:
        done = in_turn(work, *otherwise)
        ended.extend(turns(field.partitions, "pg_terminate_backend(pid)", is_granted=True))
        return done

    monkeypatch.setattr(field.partitions, "in_turn", and_then_it_is_lost)
    assert len(field.partitions.extend(WEEK, 8)) == 4
    assert ended == [True]


def test_another_length_begins_where_the_last_one_ends(field: ConvertedTable) -> None:
    assert len(field.partitions.extend(3 * DAY, 16)) > 3
    *parts, _ = field.partitions.all()
    assert all(a.until == b.since for a, b in itertools.pairwise(parts))


def test_tasks_that_no_partition_is_there_for_are_kept_in_the_default_one(
    field: ConvertedTable,
) -> None:
    """No process created partitions for weeks."""
    late = 8 * WEEK
    one = field.put(-late, Status.NOT_COMPLETE)
    assert field.places() == ["_default"]
    edge = edge_after(field.now + late, WEEK)
    made = field.at(late, lambda partitions: partitions.extend(WEEK, 2))
    assert made == [f"{TASKS}_p{edge:%Y%m%d}", f"{TASKS}_p{edge + WEEK:%Y%m%d}"]
    assert field.places() == ["_default"]
    assert field.store.tasks.cancel(one.id) is not None
    # If the default partition has a task of a future period, that period gets no partition.
    field.put(-late - 5 * WEEK)
    edge += 2 * WEEK
    made = field.at(late, lambda partitions: partitions.extend(WEEK, 6))
    skipped = edge_after(field.now + late + 5 * WEEK, WEEK) - WEEK
    wanted = [edge + n * WEEK for n in range(4) if edge + n * WEEK != skipped]
    assert made == [f"{TASKS}_p{since:%Y%m%d}" for since in wanted]
    assert len(wanted) == 3


def test_when_the_partitions_end_is_known(field: ConvertedTable) -> None:
    assert field.store.sweeps.partitions_end() == edge_after(field.now, WEEK) + 4 * WEEK


@pytest.mark.parametrize("url", ["sqlite://", "mysql://nobody@nowhere/x"])
def test_other_databases_are_told_what_to_do_instead(url: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"partitions need PostgreSQL, and this is (sqlite|mysql): .*purge_after_s",
    ):
        Partitions(Database(url))


# -- old partitions -------------------------------------------------------------------------------


def test_an_old_partition_goes_with_all_that_is_finished_in_it(field: ConvertedTable) -> None:
    for status in (Status.DONE, Status.FAILED, Status.CANCELLED):
        field.put(10 * WEEK, status)
        field.put(6 * WEEK, status)
    young = field.put(3 * WEEK)
    before = field.names()
    dropped = field.drop()
    assert [each.moved for each in dropped] == [0] * len(dropped)
    assert field.names() == [
        name for name in before if TASKS + name not in {each.name for each in dropped}
    ]
    assert list(field.rows()) == [young.id]
    assert {
        part.until is None or part.until >= field.now - 4 * WEEK for part in field.partitions.all()
    } == {True}
    assert field.drop() == []


@pytest.mark.parametrize("status", [*LIVE, Status.of(9)], ids=str)
def test_what_is_not_finished_is_moved_as_it_is(field: ConvertedTable, status: Status) -> None:
    """The move copies the whole row, including columns that another program added to the table."""
    for more in ("note text", "twice bigint GENERATED ALWAYS AS (version * 2) STORED"):
        field.run(f"ALTER TABLE {TASKS} ADD COLUMN {more}")
    field.put(6 * WEEK)
    lease = {
        "lease_until": seconds(field.now, 60),
        "worker": "w-1",
        "ip_address": 7,
        "attempts": 3,
        "lapses": 2,
    }
    rest = {
        "headers": "{}",
        "error_stack": "e",
        "execution_time": field.now,
        "queue": "q",
        "priority": 4,
        "version": 41,
    }
    one = field.put(6 * WEEK, status, task_key="k", **lease, **rest)
    field.run(f"UPDATE {TASKS} SET note = 'mine'")
    before = field.rows()[one.id]
    dropped = field.drop()
    assert sum(each.moved or 0 for each in dropped) == 1
    assert field.rows() == {one.id: ("_default", before[1])}


def test_what_ended_lately_stays_as_long_as_a_purge_would_leave_it(field: ConvertedTable) -> None:
    long_ago = field.put(6 * WEEK, Status.FAILED, ended=5 * WEEK)
    lately = field.put(6 * WEEK, Status.FAILED, ended=2 * WEEK)
    late = field.put(6 * WEEK, Status.DONE, update_time=field.now - DAY)
    # The task was cancelled early, so its age counts from its due time.
    due = field.put(6 * WEEK, Status.CANCELLED, expected_time=field.now - DAY)
    field.drop()
    assert list(field.rows()) == sorted([lately.id, late.id, due.id])
    assert field.store.tasks.get(long_ago.id) is None
    assert field.store.sweeps.purge(4 * 7 * 86400, 100) == 0


def test_a_partition_with_too_much_that_must_stay_is_kept(
    field: ConvertedTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "MAX_MOVED", 2)
    for _ in range(3):
        field.put(6 * WEEK, Status.NOT_COMPLETE)
    before = field.rows()
    kept = [each for each in field.drop() if each.moved is None]
    assert len(kept) == 1
    assert field.rows() == before
    monkeypatch.setattr(pruning, "MAX_MOVED", 3)
    assert field.drop() == [Pruned(kept[0].name, 3)]


def test_partitions_can_be_left_as_tables_of_what_is_finished(field: ConvertedTable) -> None:
    done, waits = field.put(6 * WEEK), field.put(6 * WEEK, Status.NOT_COMPLETE)
    [name] = [each.name for each in field.drop(detaches_only=True) if each.moved]
    assert field.places() == ["_default"]
    assert field.run(f"SELECT id FROM {name}") == [(done.id,)]
    assert read(field.store, waits.id).status is Status.NOT_COMPLETE


def test_the_keys_and_attempts_of_what_is_dropped_go_and_those_of_what_waits_stay(
    field: ConvertedTable,
) -> None:
    finished, waits = (
        field.put(6 * WEEK, task_key="f"),
        field.put(6 * WEEK, Status.NOT_COMPLETE, task_key="w"),
    )
    young = field.put(DAY, task_key="y")
    k = field.store.schema.keys
    with field.store.database.begin() as connection:
        # Another program left the first three rows. The others are the mark of a table that
        # existed before the upgrade, and a pointer to a task in another database.
        pairs = [
            ("mail", "f", finished.id),
            ("mail", "w", waits.id),
            ("mail", "y", young.id),
            ("", "mark", 0),
        ]
        pairs += [("mail", "p", finished.id + 2**17)]
        connection.execute(
            insert(k),
            [dict(zip(("tag", "task_key", "task_id"), pair, strict=True)) for pair in pairs],
        )
        made = [
            {"task_id": one.id, "version": 1, "attempt": 1, "ended": field.now}
            for one in (finished, waits, young)
        ]
        connection.execute(insert(field.store.schema.attempts), made)
    field.drop()
    with field.store.database.begin() as connection:
        assert sorted(connection.execute(select(k.c.task_key)).scalars()) == ["mark", "p", "w", "y"]
        left = connection.execute(select(field.store.schema.attempts.c.task_id)).scalars()
        assert sorted(left) == sorted([waits.id, young.id])


def test_what_must_stay_is_found_by_an_index_while_everybody_waits(field: ConvertedTable) -> None:
    field.fill(5000, field.now - 6 * WEEK, Status.DONE)
    field.put(6 * WEEK, Status.NOT_COMPLETE)
    shown: list[str] = []

    def explain(connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.startswith("INSERT INTO"):
            shown.append(
                "".join(connection.exec_driver_sql("EXPLAIN " + statement, parameters).scalars())
            )

    event.listen(field.store.database.tx, "before_cursor_execute", explain)
    field.drop()
    event.remove(field.store.database.tx, "before_cursor_execute", explain)
    assert shown
    assert all("_stays" in plan and "Seq Scan" not in plan for plan in shown)
    assert field.places() == ["_default"]


# -- concurrent changes ---------------------------------------------------------------------------


def test_a_task_that_runs_meanwhile_settles(field: ConvertedTable) -> None:
    field.put(6 * WEEK, Status.NOT_COMPLETE, task_key="k")
    claims = field.store.claims("w-1", None)
    [claimed] = claims.claim_due("default", [0], 10)
    settling: list[Future[set[int]]] = []

    def settle() -> None:
        settling.append(pool.submit(claims.settle, [Settlement(claimed, "succeed")]))
        wait_until(lambda: _waits_for_a_lock(field), 10, "the settlement to wait")

    with ThreadPoolExecutor() as pool, field.upon("DETACH", claimed, settle):
        dropped = field.drop()
    assert settling[0].result() == {claimed.id}
    assert sum(each.moved or 0 for each in dropped) == 1
    found = read(field.store, claimed.id)
    assert (found.status, found.version) == (Status.DONE, claimed.version + 1)
    assert field.places() == ["_default"]


def _waits_for_a_lock(field: ConvertedTable) -> bool:
    return bool(
        field.run(f"SELECT 1 FROM pg_locks WHERE NOT granted AND relation = to_regclass('{TASKS}')")
    )


def test_a_task_that_is_settled_or_retried_between_looking_and_moving_is_seen(
    field: ConvertedTable,
) -> None:
    failed, running = field.put(6 * WEEK, Status.FAILED), field.put(6 * WEEK, Status.RUNNING)
    again = field.put(6 * WEEK, Status.FAILED)
    claims = field.store.claims("w-1", None)

    def work() -> None:
        field.store.tasks.retry(failed.id, field.now)
        assert claims.settle([Settlement(running, "succeed")]) == {running.id}
        retried = field.store.tasks.retry(again.id, field.now - DAY)
        [claimed] = claims.claim([entry(retried)])
        assert claims.settle([Settlement(claimed, "fail", error="again")]) == {again.id}

    with field.upon("CREATE INDEX CONCURRENTLY", failed, work):
        field.drop()
    assert {read(field.store, one.id).status for one in (failed,)} == {Status.NOT_COMPLETE}
    assert read(field.store, running.id).status is Status.DONE
    assert read(field.store, again.id).error == "again"


def test_a_task_that_is_retried_meanwhile_keeps_its_key(field: ConvertedTable) -> None:
    failed = field.put(6 * WEEK, Status.FAILED, task_key="k")
    k = field.store.schema.keys
    with field.store.database.begin() as connection:
        # Another program failed the task and left its key.
        connection.execute(insert(k).values(tag="mail", task_key="k", task_id=failed.id))
    with field.upon(
        f"FROM {k.name} JOIN", failed, lambda: field.store.tasks.retry(failed.id, field.now)
    ):
        field.drop()
    assert read(field.store, failed.id).status is Status.NOT_COMPLETE
    assert field.store.tasks.id_of_key("mail", "k") == failed.id


def test_a_partition_that_somebody_else_just_dropped_is_no_error(field: ConvertedTable) -> None:
    waits = field.put(6 * WEEK, Status.NOT_COMPLETE)

    with field.upon("CREATE INDEX CONCURRENTLY", waits, lambda: _drop_all(field)):
        field.drop()
    assert list(field.rows()) == [waits.id]


def _drop_all(field: ConvertedTable) -> None:
    assert list(pruning.prune(Partitions(field.store.database, PREFIX), 4 * WEEK))


# -- the planner ----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["no", "quiet"])
def planned(postgresql_url: str, request: pytest.FixtureRequest) -> Iterator[ConvertedTable]:
    """Yield six partitions of finished rows without statistics, or with statistics from a quiet
    period. Afterwards, many rows of the last partition become due."""
    made = ConvertedTable(postgresql_url)
    for name in made.names():
        made.run(f"ALTER TABLE {TASKS}{name} SET (autovacuum_enabled = off)")
    for week in range(6):
        made.fill(5000, made.now - week * WEEK, Status.DONE)
    if request.param == "quiet":
        made.store.database.alone(lambda c: c.exec_driver_sql(f"VACUUM ANALYZE {TASKS}"))
    made.fill(40_000, made.now + timedelta(seconds=1), Status.NOT_COMPLETE)
    made.run(f"UPDATE {TASKS} SET expected_time = now() - interval '10 seconds' WHERE status = 0")
    yield made
    made.close()


def filled(field: ConvertedTable) -> set[str]:
    """Return the partitions that have rows, because the plan for an empty one does not matter."""
    return {row[0] for row in field.run(f"SELECT DISTINCT tableoid::regclass::text FROM {TASKS}")}


def read_as_a_whole(field: ConvertedTable, shown: str) -> set[str]:
    return set(re.findall(r"Seq Scan on (\w+)", shown)) & filled(field)


def searched(shown: str) -> set[str]:
    return set(re.findall(rf"Scan (?:using \w+ )?on {TASKS}(_p\d+)\b", shown))


def test_a_claim_by_id_looks_for_rows_in_their_partition_alone(planned: ConvertedTable) -> None:
    store, claims = planned.store, planned.store.claims("w", None)
    *some, other = store.tasks.find(None, Status.NOT_COMPLETE, None, None, None, None, 20).tasks
    claiming = plans(store, lambda: claims.claim([entry(one) for one in some]))
    assert read_as_a_whole(planned, claiming) == set()
    mine = f"_p{edge_after(planned.now, WEEK) - WEEK:%Y%m%d}"
    assert searched(claiming) == {mine}
    for work in (
        lambda: claims.settle([Settlement(one, "succeed") for one in some]),
        lambda: store.tasks.get(some[0].id),
        lambda: store.tasks.cancel(other.id),
    ):
        shown = plans(store, work)
        assert searched(shown) == {mine}
        assert "Seq Scan" not in shown.replace("Seq Scan on q_yb_delay_task_key", "")


def test_the_slow_path_reads_no_more_than_it_takes(planned: ConvertedTable) -> None:
    """The query merges the hot indexes of all partitions, and those without waiting rows are
    empty."""
    store, claims = planned.store, planned.store.claims("w", None)
    for work in (
        lambda: claims.claim_due("default", [0], 5),
        lambda: store.sweeps.levels(1.0),
    ):
        shown = plans(store, work)
        assert read_as_a_whole(planned, shown) == set()
        assert "Merge Append" in shown
        assert "Sort  (" not in shown
        assert not any(f"{name}_expected_time_status_idx" in shown for name in filled(planned))


def test_the_sweep_reads_hot_and_near_rows_by_their_indexes(planned: ConvertedTable) -> None:
    store, claims, now = planned.store, planned.store.claims("w", None), planned.now
    for work in (
        lambda: claims.claim_abandoned("default", [0]),
        lambda: store.sweeps.lapse(5, 100),
        lambda: store.leases.renew(["w"], now),
        lambda: list(store.sweeps.near(now, seconds(now, 30), 0, 1)),
    ):
        assert read_as_a_whole(planned, plans(store, work)) == set()
