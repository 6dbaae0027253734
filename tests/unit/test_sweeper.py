"""A sweep arms the rows that are due within the horizon, expires workers, drains and purges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import insert, select, update

from delaytasks import DelayTask, Status
from delaytasks.core.clock import Clock
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.filters import LogEntry
from delaytasks.core.interfaces import Entry
from delaytasks.core.policies import Policies, Policy
from delaytasks.maintenance import sweeper
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.storage.rows import values_of
from tests.conftest import open_store, settings_for
from tests.recording import CrashError, counted
from tests.world.broker import RecordingTimer

# -- sweeps on an SQLite file, with a timer that records what it is given -------------------------


_ids = count(1)


class SweeperHarness:
    """A table and its sweeper."""

    def __init__(self, url: str, **changes: Any) -> None:
        self.settings = settings_for(url, **changes)
        self.store = open_store(url, **changes)
        self.clock = Clock(self.store.tasks.now)
        self.events, self.timer = Events(), RecordingTimer()
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.events.subscribe(lambda name, fields: self.told.append((name, fields)))

    def sweeper(self, timer: Any = None) -> Sweeper:
        parts = (
            self.settings,
            self.store.sweeps,
            self.store.workers,
            self.clock,
            timer or self.timer,
            self.events,
        )
        return Sweeper(*parts)

    def row(self, in_s: float = 5, status: Status = Status.NOT_COMPLETE, **changes: Any) -> int:
        return self.rows([in_s], status, **changes)[0]

    def rows(
        self, in_s: Iterable[float], status: Status = Status.NOT_COMPLETE, **changes: Any
    ) -> list[int]:
        """Insert a row for each number of seconds, all in one transaction."""
        if status is Status.RUNNING:
            changes = {"worker": "w", "lease_until": self.clock.now() + timedelta(60), **changes}
        now = self.clock.now()
        tasks = [
            DelayTask(next(_ids), "mail", "{}", now + timedelta(seconds=s), status, create_time=now)
            for s in in_s
        ]
        with self.store.database.begin() as connection:
            connection.execute(
                insert(self.store.schema.tasks),
                [{**values_of(task, self.store.schema), **changes} for task in tasks],
            )
        return [task.id for task in tasks]

    def sweep(self, sweep_partition: int = 0, timer: Any = None) -> list[int]:
        """Sweep after the usual time, and return the ids that the sweep armed."""
        before = len(self.timer.armed)
        self.let_pass()
        assert self.sweeper(timer).sweep(sweep_partition)
        return [entry.id for entry in self.timer.armed[before:]]

    def let_pass(self) -> None:
        s = self.store.schema.sweeps
        with self.store.database.begin() as connection:
            connection.execute(update(s).values(swept_at=self.clock.now() - timedelta(seconds=60)))

    def armed_until(self, sweep_partition: int = 0) -> datetime:
        s = self.store.schema.sweeps
        with self.store.database.auto.connect() as connection:
            query = select(s.c.armed_until).where(s.c.sweep_partition == sweep_partition)
            found: datetime = connection.execute(query).scalar_one()
            return found

    def near_until(self, in_s: float) -> None:
        """Record that a sweep has armed the rows due within `in_s`."""
        s = self.store.schema.sweeps
        with self.store.database.begin() as connection:
            connection.execute(
                update(s).values(armed_until=self.clock.now() + timedelta(seconds=in_s))
            )

    def status(self, id: int) -> Status:
        found = self.store.tasks.get(id)
        assert found is not None
        return found.status

    def serve(self, name: str, *queues: str) -> None:
        self.store.workers.report(name, queues, "prefork", 2, 0)

    def silence(self, name: str) -> None:
        w = self.store.schema.workers
        with self.store.database.begin() as connection:
            long_ago = self.clock.now() - timedelta(seconds=60)
            connection.execute(update(w).where(w.c.name == name).values(seen_at=long_ago))

    def count(self, event: str) -> int:
        return self.events.counts[event]


Make = Callable[..., SweeperHarness]


# -- fixtures of the tests of the sweeper ---------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[SweeperHarness] = []

    def new(**changes: Any) -> SweeperHarness:
        made.append(SweeperHarness(f"sqlite:///{tmp_path / f'{len(made)}.sqlite3'}", **changes))
        return made[-1]

    yield new
    for field in made:
        field.store.close()


@pytest.fixture
def field(make: Make) -> SweeperHarness:
    return make()


# -- A sweep arms the rows that are due within the horizon ----------------------------------------


def test_a_long_pause_leaves_no_gap(field: SweeperHarness) -> None:
    field.sweep()
    field.near_until(-100)
    late, near = field.row(-50), field.row(25)
    assert field.sweep() == [near]
    assert late not in field.timer.ids, "it is overdue, and drained"


class CrashingTimer(RecordingTimer):
    """Raise CrashError after `calls` calls, and keep the entries that were armed before."""

    def __init__(self, calls: int, armed: list[Entry]) -> None:
        super().__init__()
        self._calls = calls
        self.armed = armed

    def arm(self, entries: Iterable[Entry]) -> bool:
        answer = super().arm(entries)
        self._calls -= 1
        if self._calls == 0:
            raise CrashError
        return answer


def test_a_crash_between_arming_and_marking_costs_duplicates_and_makes_no_gap(
    field: SweeperHarness,
) -> None:
    ids = field.rows(19.9 + n / 250 for n in range(2500))
    crashing = CrashingTimer(2, field.timer.armed)
    field.let_pass()
    with pytest.raises(CrashError):
        field.sweeper(crashing).sweep()
    armed = len(field.timer.armed)
    assert 0 < armed < len(ids)
    assert field.sweep() == ids, "all of them again, also those after the crash"
    assert len(field.timer.armed) == armed + len(ids)


def test_while_the_broker_is_unavailable_nothing_counts_as_armed(field: SweeperHarness) -> None:
    ids = [field.row(5), field.row(10)]
    field.timer.is_up = False
    field.sweep()
    field.sweep()
    assert field.armed_until() <= field.clock.now()
    assert field.count("sweep.armed") == 0
    field.timer.is_up = True
    assert field.sweep() == ids
    assert field.count("sweep.armed") == 2


class RefusingTimer(RecordingTimer):
    """Simulate a broker that is available and refuses one queue."""

    def arm(self, entries: Iterable[Entry]) -> bool:
        entries = list(entries)
        super().arm(entry for entry in entries if entry.queue != "bad")
        return all(entry.queue != "bad" for entry in entries)


def test_a_refused_queue_does_not_keep_other_rows_from_being_armed(field: SweeperHarness) -> None:
    refused = field.rows((20 + n / 1000 for n in range(1200)), queue="bad")
    ids = field.rows(25 + n / 1000 for n in range(1200))
    refusing = RefusingTimer()
    field.sweep(timer=refusing)
    assert refusing.ids == ids
    field.sweep(timer=refusing)
    assert refusing.ids == ids, "and not again at each sweep"
    assert set(refused).isdisjoint(refusing.ids), "they are drained when they are overdue"


def test_a_clock_without_a_measurement_arms_nothing_and_marks_nothing(
    field: SweeperHarness,
) -> None:
    id = field.row(5)
    known = field.clock

    def fail(insists: bool) -> datetime:
        raise StoreUnavailableError("the database can not be reached")

    field.clock = Clock(fail)
    assert field.sweeper().sweep()
    assert field.armed_until() <= known.now()
    field.clock = known
    assert field.sweep() == [id]


@pytest.mark.parametrize(
    "stage", ["expire", "due_between", "recover", "levels_of", "purge", "purge_audit"]
)
def test_a_stage_that_fails_does_not_prevent_the_other_stages(
    make: Make, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = make(purge_after=3600)
    long_ago = field.clock.now() - timedelta(hours=2)
    near = field.row(5)
    lapsed = field.row(-5, Status.RUNNING, lease_until=field.clock.now() - timedelta(seconds=1))
    old = field.row(-7200, Status.DONE, update_time=long_ago)
    field.store.bulk.begin(
        LogEntry(1, "cancel", {}, "ann", "done", long_ago, long_ago, long_ago, 0, 0, 0)
    )
    field.row(-60)
    field.serve("w1", "default")
    field.serve("dead", "default")
    field.silence("dead")

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("a row can not be read")

    monkeypatch.setattr(
        field.store.workers if stage == "expire" else field.store.sweeps, stage, fail
    )
    field.sweep()
    done = {
        "expire": field.count("worker.lost") == 1,
        "due_between": field.timer.ids == [near],
        "recover": field.status(lapsed) is Status.NOT_COMPLETE,
        "levels_of": len(field.timer.requested_drains) == 1,
        "purge": field.store.tasks.get(old) is None,
        "purge_audit": field.store.bulk.log(10) == [],
    }
    assert [name for name, is_done in done.items() if not is_done] == [stage]
    [failure] = [fields for name, fields in field.told if name == "loop.failed"]
    names = {
        "expire": "workers",
        "due_between": "arm",
        "recover": "abandoned",
        "levels_of": "overdue",
        "purge": "purge",
    }
    names["purge_audit"] = "audit"
    assert (failure["loop"], failure["stage"]) == ("sweep", names[stage])
    assert failure["error"] == "ValueError: a row can not be read"


def test_drain_messages_that_could_not_be_sent_are_not_reported(field: SweeperHarness) -> None:
    field.row(-60)
    field.serve("w1", "default")
    field.timer.is_up = False
    field.sweep()
    assert field.count("sweep.drain") == 0
    field.timer.is_up = True
    field.sweep()
    assert field.count("sweep.drain") == 1


def test_if_the_broker_takes_no_messages_the_sweeping_worker_drains_its_own_queues(
    field: SweeperHarness,
) -> None:
    for queue in ("default", "mail"):
        field.row(-60, queue=queue)
        field.serve(f"w-{queue}", queue)
    sweeper, here = field.sweeper(), list[tuple[str, Sequence[int]]]()

    def drain(queue: str, priorities: Sequence[int]) -> bool:
        here.append((queue, priorities))
        return queue == "default"

    for is_up in (True, False):
        field.timer.is_up = is_up
        field.let_pass()
        assert sweeper.sweep(start_drain=drain)
    assert here == [("default", [0]), ("mail", [0])]
    assert field.count("sweep.local_drain") == 1


def test_a_sweep_that_could_not_read_the_policies_releases_nothing(field: SweeperHarness) -> None:
    """Without policies, no row seems to be paused."""
    done: list[str] = []
    is_away = True

    def policies() -> Policies:
        if is_away:
            raise StoreUnavailableError("away")
        return Policies(())

    holding: Any = SimpleNamespace(
        read=policies, walk=lambda *_: done.append("walk"), hold_near=lambda *_: None
    )
    sweeper = field.sweeper()
    sweeper._pauses = holding
    field.let_pass()
    assert sweeper.sweep()
    assert done == []
    is_away = False
    field.let_pass()
    assert sweeper.sweep()
    assert done == ["walk"]


def test_a_late_row_is_drained_although_the_broker_refuses_near_rows(field: SweeperHarness) -> None:
    field.row(5)
    field.row(-60)
    field.serve("w1", "default")
    field.timer.is_up = False
    field.sweep()
    assert [queue for queue, _, _ in field.timer.requested_drains] == ["default"]


def test_without_a_horizon_nothing_is_armed_by_sweeps(make: Make) -> None:
    field = make(horizon=None)
    field.row(5)
    assert field.sweep() == []


# -- A sweep is alone, expires workers, drains queues and purges ----------------------------------


def test_partitions_share_the_rows_and_the_first_does_the_other_work(make: Make) -> None:
    field = make(sweep=(5, 3))
    ids = [field.row(5) for _ in range(60)]
    lapsed = field.row(-60, Status.RUNNING, lease_until=field.clock.now() - timedelta(seconds=1))
    field.serve("w1", "default")
    field.row(-60)
    shares = [field.sweep(sweep_partition) for sweep_partition in (1, 2)]
    assert field.status(lapsed) is Status.RUNNING
    assert field.timer.requested_drains == []
    shares.insert(0, field.sweep(0))
    assert field.status(lapsed) is Status.NOT_COMPLETE
    assert len(field.timer.requested_drains) == 1
    assert sorted(id for share in shares for id in share) == ids, "each row is in one partition"
    assert min(len(share) for share in shares) >= 10
    assert [field.sweep(sweep_partition) for sweep_partition in range(3)] == [[], [], []]


# -- workers that died ---------------------------------------------------------------------------


def test_rows_that_a_dead_worker_held_are_armed_again(field: SweeperHarness) -> None:
    field.serve("w1", "default")
    field.serve("w2", "default")
    ids = [field.row(5), field.row(20)]
    assert field.sweep() == ids
    field.silence("w1")
    assert field.sweep() == ids
    assert [fields["worker"] for name, fields in field.told if name == "worker.lost"] == ["w1"]
    assert field.sweep() == [], "it is told once"


def test_a_worker_that_was_silent_briefly_is_not_expired(field: SweeperHarness) -> None:
    field.serve("w1", "default")
    w = field.store.schema.workers
    with field.store.database.begin() as connection:
        silent_s = field.settings.sweep_s * 2
        connection.execute(
            update(w).values(seen_at=field.clock.now() - timedelta(seconds=silent_s))
        )
    field.sweep()
    assert field.count("worker.lost") == 0


def test_a_worker_that_dies_while_a_partition_is_swept_is_not_forgotten(make: Make) -> None:
    """The sweep began before the worker expired, so it must not mark all rows as armed."""
    field = make(sweep=(5, 2))
    field.serve("w1", "default")
    ids = [field.row(15 + n / 100) for n in range(40)]
    mine = [*field.sweep(0), *field.sweep(1)]
    assert sorted(mine) == ids

    class Meanwhile(RecordingTimer):
        def arm(self, entries: Iterable[Entry]) -> bool:
            field.silence("w1")
            field.sweep(0)
            return super().arm(entries)

    field.row(29.9)
    field.row(29.9)
    field.near_until(29)
    field.sweep(1, timer=Meanwhile())
    again = field.sweep(1)
    assert set(ids) <= {*field.timer.ids[len(mine) :], *again}


# -- overdue rows --------------------------------------------------------------------------------


def test_overdue_rows_cause_a_few_drain_messages_for_served_queues(field: SweeperHarness) -> None:
    for _ in range(50):
        field.row(-60, queue="mail", priority=3)
        field.row(-60, queue="mail", priority=5)
    field.row(-60, queue="nobody")
    field.row(-0.2)  # within the grace period
    field.serve("w1", "default", "mail")
    field.serve("w2", "mail")
    field.sweep()
    [(queue, priorities, messages)] = field.timer.requested_drains
    assert (queue, sorted(priorities), messages) == (
        "mail",
        [3, 5],
        2 * field.settings.drain_messages,
    )
    assert [fields["queue"] for name, fields in field.told if name == "queue.unserved"] == [
        "nobody"
    ]


@pytest.mark.parametrize(
    ("changes", "age", "left"),
    [
        ({}, timedelta(days=29), 28),
        ({}, timedelta(days=31), 3),
        ({"purge_after": None}, timedelta(days=31), 28),
        ({"purge_after": "1h"}, timedelta(hours=2), 3),
    ],
    ids=str,
)
def test_rows_that_ended_long_ago_are_deleted_and_all_others_stay(
    make: Make, monkeypatch: pytest.MonkeyPatch, changes: Any, age: timedelta, left: int
) -> None:
    monkeypatch.setattr(sweeper, "PURGE_ROWS", 10)
    field = make(**changes)
    old, past_s = field.clock.now() - age, -age.total_seconds()
    for _ in range(25):
        field.row(past_s, Status.DONE, update_time=old)
    field.row(past_s, update_time=old)
    field.row(
        past_s,
        Status.RUNNING,
        update_time=old,
        lease_until=field.clock.now() + timedelta(hours=1),
    )
    field.row(past_s, Status.FAILED)
    field.sweep()
    assert sum(counted(field.store).values()) == left
    assert field.count("task.purged") == 28 - left


def test_workers_without_a_broker_cause_no_drain_messages(tmp_path: Path) -> None:
    field = SweeperHarness(f"sqlite:///{tmp_path / 'here.sqlite3'}")
    field.store.workers.report("drainer", ["*"], "drain/prefork", 2, 0)
    field.store.workers.report("direct", ["default"], "direct/prefork", 2, 0)
    field.row(-60)
    field.sweep()
    assert "queue.unserved" in [name for name, _ in field.told]
    field.store.workers.report("worker", ["default"], "prefork", 2, 0)
    field.sweep()
    [messages] = [fields["messages"] for name, fields in field.told if name == "sweep.drain"]
    assert messages == field.settings.drain_messages
    field.store.close()


def test_sweeps_without_a_broker_do_not_replace_sweeps_with_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'here.sqlite3'}"
    field, direct = SweeperHarness(url), open_store(url, timer="direct")
    assert direct.sweeps.begin_sweep(0, 1, 4) is not None
    assert field.store.sweeps.stale_sweep_partitions(1, 10) == [0]
    assert field.store.sweeps.begin_sweep(0, 1, 4) is not None
    assert (
        field.store.sweeps.stale_sweep_partitions(1, 10),
        direct.sweeps.stale_sweep_partitions(1, 10),
    ) == ([], [])
    assert direct.sweeps.begin_sweep(0, 1, 4) is None
    direct.close()
    field.store.close()


def test_abandoned_rows_are_recovered_in_any_number(
    field: SweeperHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeper, "RECOVER_ROWS", 10)
    over, lasting = (
        field.clock.now() - timedelta(seconds=1),
        field.clock.now() + timedelta(seconds=60),
    )
    lapsed = [field.row(-60, Status.RUNNING, lease_until=over) for _ in range(25)]
    last = field.row(
        -60, Status.RUNNING, lease_until=over, lapses=field.settings.max_lost_leases - 1
    )
    runs = field.row(-60, Status.RUNNING, lease_until=lasting)
    field.sweep()
    assert {field.status(id) for id in lapsed} == {Status.NOT_COMPLETE}
    assert (field.status(last), field.status(runs)) == (Status.FAILED, Status.RUNNING)
    assert field.count("task.recovered") == 26


def test_a_worker_drains_its_own_queues_without_a_sweep(field: SweeperHarness) -> None:
    field.row(-60)
    field.row(-60, priority=9)
    field.row(-60, queue="mail")
    field.row(-60, queue="paused")
    field.row(-0.5)
    field.row(60, queue="later")
    sweeper, here = field.sweeper(), list[tuple[str, Sequence[int]]]()
    paused: Any = SimpleNamespace(
        read=lambda: Policies((Policy("queue", "paused", is_paused=True),))
    )
    sweeper._pauses = paused
    sweeper.start_own_drains(
        ["default", "mail", "paused", "later"],
        lambda queue, priorities: here.append((queue, priorities)) or True,
    )
    assert sorted((queue, sorted(priorities)) for queue, priorities in here) == [
        ("default", [0, 9]),
        ("mail", [0]),
    ]


def paused(is_paused: bool = True) -> Policies:
    return Policies((Policy("tag", "mail", is_paused=is_paused, version=1),))
