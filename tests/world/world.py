"""`World` and `Worker`, by which tests make and read the moves of rows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any
from unittest import mock

import pytest
from celery import Celery
from sqlalchemy import URL, Connection, Engine, Table, delete, event, insert, select, text, update

import delaytasks as e
from delaytasks import DelayedTask, DelayTasks, Status
from delaytasks.db import sessions
from delaytasks.db.claims import Claims, UnclaimedRow
from delaytasks.db.schema import moved
from delaytasks.db.statements import values_of
from delaytasks.db.store import Store
from delaytasks.db.sweep_queries import Renewed, ServiceTimes
from delaytasks.db.types import Capabilities, UTCDateTime, db_now_plus
from delaytasks.limits.admission import Admission
from delaytasks.model.clock import Clock, IdMaker, to_us
from delaytasks.model.moves import SettlingMove
from delaytasks.model.task import Attempt, Claimed, Entry, Recovered, Settlement
from delaytasks.operate.state import DeploymentState, LiveGroup, live_groups
from delaytasks.operate.why import Reason, why
from delaytasks.run.runner import Report, Runner
from delaytasks.worker.processes import Processes
from delaytasks.worker.sweep import OverdueQueues
from tests.proxy import Proxy, proxy_to
from tests.world.broker import WorldBroker
from tests.world.recording import counted, delays_on, overheard, set_columns

#: A due time in the past. SQLite's clock has milliseconds, so that a row which is due now may not
#: be due yet for the next statement.
DUE_S = -10.0
ALL_PRIORITIES = range(10)
MILLISECOND = timedelta(milliseconds=1)
#: Text with characters that statements, COPY and JSON treat in special ways.
NASTY = (
    "tab\there, line\nbreak, return\rhere, back\\slash, \\N, \\., "
    "'quotes' \"double\", %s :name, 😀 ünï, <b>&"
)
#: The limits that `World.lower` lowers, and their names in the code of today.
LIMITS = {
    "tasks_counted": "operate.forecast.MAX_COUNTED",
    "occurrences_computed": "operate.forecast.MAX_OCCURRENCES",
    "rows_of_a_purge": "worker.sweep.PURGE_ROWS",
    "purges_of_a_sweep": "worker.sweep.PURGE_STEPS",
    "rows_of_a_bulk_step": "operate.task_calls.BULK_ROWS",
    "rows_of_a_touch": "db.task_rows.TOUCH_BATCH_ROWS",
    "seconds_before_a_second_try": "operate.task_calls.BUSY_S",
    "rows_of_a_bulk_window": "db.bulk_moves.WINDOW",
    "held_rows_of_a_page": "db.policy_rows.HELD_PAGE",
    "rows_of_a_release": "db.policy_rows.RELEASED_ROWS",
    "share_of_a_release": "worker.sweep.RELEASE_SHARE",
    "seconds_between_searches": "worker.sweep.SEARCH_HELD_S",
    "seconds_between_policy_reads": "model.policies.POLICY_REFRESH_S",
}
_ids = itertools.count(1_000_000)
#: The instant of a column `:s` seconds earlier, by database.
_EARLIER = {
    "postgresql": "{0} - make_interval(secs => :s)",
    "mysql": "{0} - INTERVAL ROUND(:s * 1000000) MICROSECOND",
    "sqlite": "strftime('%Y-%m-%d %H:%M:%f', {0}, (-:s) || ' seconds')",
}


#: What the stages of a sweep call first, and what the thread that sweeps calls.
STAGES = {
    "policies": "runtime.policy_cache.refresh",
    "clock": "runtime.clock.certain_now",
    "workers": "store.workers.expire",
    "arm": "store.sweeps.due_between",
    "abandoned": "store.leases.recover",
    "unserved": "store.sweeps.next_queues",
    "purge": "store.sweeps.purge",
    "audit": "store.bulk.audit.purge",
    "report": "store.workers.report",
    "sign off": "store.workers.remove",
    "requested": "store.sweeps.begin_sweep",
}

#: The columns that make a row one that a worker runs.
RUNNING: dict[str, Any] = {"status": int(Status.RUNNING), "worker": "worker-1"}
RUNNING["lease_until"] = db_now_plus(60)


def status_columns(status: Status) -> dict[str, Any]:
    """Return the columns that give a row this status."""
    return RUNNING if status is Status.RUNNING else {"status": int(status)}


class World:
    """One `DelayTasks` on a database with tables, and the workers that a test makes.

    Parameters
    ----------
    store
        The database with its tables, which several worlds use one after another.
    broker
        The URL of the broker of Celery's events. All else is sent to `WorldBroker`.
    settings
        The settings of the `DelayTasks`.
    """

    def __init__(self, store: Store, broker: str = "memory://", **settings: Any) -> None:
        url = store.database.url.render_as_string(hide_password=False)
        prefix = store.schema.tasks.name.removesuffix("yb_delay_task_message")
        app = Celery("world", broker=broker, set_as_current=False)
        usual = {"table_prefix": prefix, "tags": "any", "_chunk_time_budget_s": 5}
        settings = {**usual, **settings}
        self.delays = DelayTasks(app, url, **settings)
        self.broker = WorldBroker()
        self.runtime: Any = self.delays._make_runtime()
        #: With keys of its own, the world needs connections of its own.
        self._owns_store = bool(settings.get("encryption_keys")) and store.schema.cipher is None
        if not self._owns_store:
            self.runtime.store = store
        self.store: Store = self.runtime.store
        self.runtime.timer = self.runtime.producer_timer = self.broker
        before = self.delays._exchange_runtime(self.runtime, is_in_test=False)
        if before is not None:
            before.close()
        #: The events of the instance, each with its fields.
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.delays.events.subscribe(lambda name, fields: self.events.append((name, fields)))
        #: Are called after each claim and before each settlement of a worker, and may raise.
        self.after_claim: Callable[[], object] = lambda: None
        self.before_settle: Callable[[Sequence[Settlement]], object] = lambda settlements: None
        #: The bodies with which the processor of the tag `note` was called.
        self.notes: list[Any] = []
        self.delays.processor("note")(self.notes.append)
        self._workers: dict[str, Worker] = {}
        self._first_statements: tuple[str, ...] = ()
        self._lock = threading.Lock()
        self._patches = pytest.MonkeyPatch()

    def close(self) -> None:
        """Close what the world has opened. The database stays open for the next world."""
        self._patches.undo()
        if not self._owns_store:
            del self.runtime.store
        self.delays.close()

    def lower(self, **limits: float) -> None:
        """Lower some of `LIMITS` until the world is closed, so that few rows reach them."""
        for name, value in limits.items():
            self._patches.setattr(f"delaytasks.{LIMITS[name]}", value)

    # -- the verbs --------------------------------------------------------------------------------

    def schedule(
        self, tag: str = "note", body: Any = None, delay: float = 0, **options: Any
    ) -> DelayedTask:
        """Schedule a task by the public API. Without a delay it is certainly due."""
        task = self.delays.schedule_delay(tag, body, delay, **options)
        if delay or task.status is not Status.NOT_COMPLETE or "session" in options:
            return task
        self.change(task, expected_time=task.expected_time + timedelta(milliseconds=-10))
        return self.read(task)

    def claim(self, *tasks: DelayedTask | Entry, by: str = "worker-1") -> Claimed:
        """Claim the named rows for a worker, as a message of theirs leads to."""
        return self.worker(by).claim(*tasks)

    def claim_due(
        self,
        queue: str = "default",
        priorities: Sequence[int] = ALL_PRIORITIES,
        most: int = 100,
        by: str = "worker-1",
    ) -> Claimed:
        """Claim the rows of a queue that are due, the highest priority first."""
        return self.worker(by).claim_due(queue, priorities, most)

    def run(self, *tasks: DelayedTask, by: str = "worker-1") -> Report:
        """Run the named tasks in a worker."""
        return self.worker(by).run(*tasks)

    def run_again(self, task: DelayedTask) -> DelayedTask:
        """Make a task due, run it, and return it."""
        self.change(task, expected_time=self.now() - timedelta(milliseconds=10))
        self.run(self.read(task))
        return self.read(task)

    def drain(
        self, queue: str = "default", most: int = 100, by: str = "worker-1", **options: Any
    ) -> Report:
        """Run the due rows of a queue in a worker."""
        return self.worker(by).drain(queue, most, **options)

    def deliver(self, by: str = "worker-1") -> list[Report]:
        """Run what the due messages and the drain requests name, and return the reports."""
        entries = self.broker.take(to_us(self.now()))
        reports = [self.worker(by).run_entries(entries)] if entries else []
        for queue, priorities, _ in self.broker.take_requested_drains():
            reports.append(self.worker(by).drain(queue, priorities=priorities))
        return reports

    def settle(
        self, claimed: DelayedTask, move: SettlingMove = "succeed", by: str = "worker-1", **end: Any
    ) -> bool:
        """End the run of a claimed row, and return whether the end was accepted."""
        return self.worker(by).settle([Settlement(claimed, move, **end)]) == {claimed.id}

    def renew(
        self, *, by: str = "worker-1", since: datetime | None = None, named: Sequence[int] = ()
    ) -> Renewed:
        """Renew a worker's leases of rows that it claimed since then, or that it names."""
        return self.store.leases.renew([by], since or self.now() - timedelta(hours=1), named)

    def recover(self, max_lost_leases: int = 5, most: int = 100) -> Recovered:
        """Release the rows whose leases have ended."""
        return self.store.leases.recover(max_lost_leases, most, self.delays.settings.lost_s)

    def sweep(self, partition: int = 0) -> bool:
        """Sweep a partition; return False if it was swept a moment before."""
        swept: bool = self.runtime.sweeper.sweep(partition)
        return swept

    def sweep_later(self, partition: int = 0) -> list[int]:
        """Sweep a partition when it is its time again, and return the ids that were armed."""
        before = len(self.broker.armed)
        self.set_columns("sweeps", swept_at=self.now() - timedelta(seconds=60))
        assert self.sweep(partition)
        return self.broker.ids[before:]

    @contextmanager
    def failing(self, stage: str, error: Exception) -> Iterator[None]:
        """Let the first call of a stage of a sweep fail, by the name that `loop.failed` has."""
        owner, _, name = STAGES[stage].rpartition(".")
        part = attrgetter(owner)(self)
        real, errors = getattr(part, name), iter([error])

        def call(*args: Any, **options: Any) -> Any:
            for one in errors:
                raise one
            return real(*args, **options)

        with mock.patch.object(part, name, call):
            yield

    @contextmanager
    def proxied(self) -> Iterator[tuple[Proxy, DelayTasks]]:
        """Yield a proxy in front of the server, and delayed tasks that reach it through this."""
        url = self.url.render_as_string(hide_password=False)
        proxy = proxy_to(url)
        with closing(proxy), closing(delays_on(proxy.url(url), table_prefix="s_")) as delays:
            yield proxy, delays

    def deny(self, *features: str) -> None:
        """Use none of these features of the database, as if it lacked them."""
        lacked = replace(self.can, **dict.fromkeys(features, False))
        self._patches.setattr(self.store.database, "can", lacked)

    def forget_armed(self) -> None:
        """Let sweeps arm again, as a worker does after its broker may have lost messages."""
        self.store.sweeps.forget_armed()

    def unswept(self, seconds: float) -> list[int]:
        """Return the partitions that workers sweep by themselves, since they were not swept."""
        partitions = self.delays.settings.sweep_partitions
        return self.store.sweeps.stale_sweep_partitions(partitions, seconds)

    def overdue_queues(self) -> OverdueQueues:
        """Return what a worker asks for overdue levels."""
        grace_s = self.delays.settings.grace_s
        return OverdueQueues(self.store.sweeps, grace_s)

    def serve(
        self,
        name: str,
        *queues: str,
        pool: str = "prefork",
        tags: Sequence[str] | None = None,
        size: int = 2,
        clock_offset_s: float = 0,
        **services: float,
    ) -> None:
        """Report a live worker of these queues, with processors of these tags.

        `services` has the seconds since it lost its broker or timer, and since beat's last message.
        """
        offset_us, times = int(clock_offset_s * 1e6), ServiceTimes(**services)
        self.store.workers.report(name, queues, pool, size, offset_us, tags, times)

    def state(self) -> DeploymentState:
        """Return the numbers of the tables, as the command `status` shows them."""
        return DeploymentState(self.runtime)

    def live(self) -> dict[str, list[LiveGroup]]:
        """Return the queues and the tags that the command `status` shows."""
        return live_groups(self.state())

    def why(self, task: DelayedTask) -> list[Reason]:
        """Return what the tables say of a task that has not run."""
        return why(self.runtime, self.read(task))

    def silence(self, seconds: float = 60, *names: str) -> None:
        """Let workers, or all of them, report nothing for a time."""
        for row in [{"name": name} for name in names] or [{}]:
            self.set_columns("workers", row, seen_at=self.now() - timedelta(seconds=seconds))

    def cancel(self, task: DelayedTask | int, **options: Any) -> Any:
        """Cancel a task by the public API."""
        return self.delays.cancel(task, **options)

    def hold(self, *ids: int) -> int:
        """Hold waiting rows as a claim holds those of a limited tag, and return their number."""
        t = self.store.schema.tasks
        where = t.c.id.in_(ids), t.c.status == int(Status.NOT_COMPLETE)
        with self.begin() as connection:
            return connection.execute(update(t).where(*where).values(moved(t, "hold"))).rowcount

    def release(self, *ids: int) -> list[Entry]:
        """Let held rows wait again as a sweep does, and return them."""
        return self.store.paused_rows.release(ids)

    def hold_back(self, *claimed: DelayedTask) -> set[int]:
        """Hold claimed rows that are paused, as a worker does, and return their ids."""
        return self.store.paused_rows.hold_claimed(claimed)

    def limit(self, tag: str = "note", **limits: Any) -> None:
        """Limit a tag, and let the workers know."""
        self.store.policies.set("tag", tag, limits, "a test")
        self.runtime.policy_cache.refresh()

    # -- time and workers -------------------------------------------------------------------------

    def now(self) -> datetime:
        """Return the time of the database."""
        return self.store.tasks.now()

    def set_clock(self, clock: Clock) -> None:
        """Let the instance read the time of this clock. The database keeps its own."""
        self.runtime.clock = self.runtime.producer._clock = clock
        self.runtime.new_id = IdMaker(lambda: clock.now_us() // 1000)

    def advance(self, seconds: float) -> None:
        """Let time pass: every instant in the tables and in waiting messages moves to the past.

        The database's clock is not touched, so that the statements are those of production.
        """
        earlier = _EARLIER[self.kind]
        with self.begin() as connection:
            for table in self.store.schema.metadata.sorted_tables:
                instants = [c.name for c in table.columns if isinstance(c.type, UTCDateTime)]
                if instants:
                    moves = ", ".join(f"{name} = {earlier.format(name)}" for name in instants)
                    connection.execute(text(f"UPDATE {table.fullname} SET {moves}"), {"s": seconds})
        moved = int(seconds * 1e6)
        self.broker.armed = [one._replace(due_us=one.due_us - moved) for one in self.broker.armed]

    def worker(self, name: str = "worker-1", **options: Any) -> Worker:
        """Return the worker of this name, which is made at its first use."""
        with self._lock:
            if name not in self._workers:
                self._workers[name] = Worker(self, name, **options)
            return self._workers[name]

    def die(self, name: str = "worker-1", max_lost_leases: int = 5) -> Recovered:
        """Let a worker die, and recover its rows as its main process does."""
        self._workers.pop(name, None)
        return self.store.leases.recover_dead([name], max_lost_leases)

    def lapse(self, *tasks: DelayedTask, max_lost_leases: int = 5) -> int:
        """End the leases of these tasks, and return how many rows were recovered."""
        over = self.now() - timedelta(seconds=1)
        for task in tasks:
            self.change(task, lease_until=over)
        return self.recover(max_lost_leases).total

    # -- rows -------------------------------------------------------------------------------------

    def new_row(self, due_s: float = DUE_S, **fields: Any) -> DelayedTask:
        """Return a task that is not written yet, and due `due_s` seconds from now."""
        now = self.now()
        values: dict[str, Any] = {"id": next(_ids), "tag": "note", "body_json": "{}"}
        values |= {"expected_time": now + timedelta(seconds=due_s), "create_time": now}
        return DelayedTask(**{**values, **fields})

    def skip_ids(self, count: int) -> None:
        """Leave out the ids that follow the last one."""
        next(itertools.islice(_ids, count, count), None)

    def put(self, status: Status = Status.NOT_COMPLETE, **fields: Any) -> DelayedTask:
        """Insert a row directly, as another program does, in any status."""
        made = self.new_row(**fields)
        row = values_of(made, self.store.schema)
        given = {"worker": made.worker, "lease_until": made.lease_until}
        row |= status_columns(status) | {name: value for name, value in given.items() if value}
        row |= {"runs": made.runs, "lapses": made.lapses}
        with self.begin() as connection:
            connection.execute(insert(self.store.schema.tasks).values(row))
        return replace(made, status=status)

    def put_many(self, count: int, due_s: float = DUE_S, **fields: Any) -> list[DelayedTask]:
        """Insert rows that are due one after another, a millisecond apart."""
        first = self.new_row(due_s, **fields)
        made = [first] + [
            replace(first, id=next(_ids), expected_time=first.expected_time + n * MILLISECOND)
            for n in range(1, count)
        ]
        self.store.tasks.new.insert_many(made)
        return made

    def put_each(self, names: Iterable[str], due_s: float = DUE_S, **row: Any) -> list[DelayedTask]:
        """Insert a row into each of these queues."""
        first = self.new_row(due_s, **row)
        made = [replace(first, id=next(_ids), queue=queue) for queue in names]
        self.store.tasks.new.insert_many(made)
        return made

    def change(self, task: DelayedTask | int, **values: Any) -> None:
        """Change columns of a row directly, as another program does."""
        t = self.table()
        id = task if isinstance(task, int) else task.id
        with self.begin() as connection:
            connection.execute(update(t).where(t.c.id == id).values(**values))

    def set_columns(self, table: str, row: Mapping[str, Any] | None = None, **values: Any) -> None:
        """Change columns of a table directly, of the rows with these values or of all rows."""
        set_columns(self.store, table, row, **values)

    def insert(self, table: str, *rows: Mapping[str, Any]) -> None:
        """Insert rows of any table directly, as another program does."""
        with self.begin() as connection:
            for start in range(0, len(rows), 1000):
                connection.execute(insert(self.table(table)), rows[start : start + 1000])

    def delete(self, table: str, **row: Any) -> None:
        """Delete the rows of a table that have these columns."""
        with self.begin() as connection:
            connection.execute(delete(self.table(table)).filter_by(**row))

    def read(self, task: DelayedTask | int) -> DelayedTask:
        """Return the task as it is now."""
        return self.delays.get(task)

    def attempts(self, task: DelayedTask) -> list[Attempt]:
        """Return the failed attempts of a task that are kept."""
        return list(self.delays.get(task, attempts=True).attempts)

    def owner(self, key: str = "k", tag: str = "note") -> int | None:
        """Return the id of the live task that has a key."""
        with suppress(e.TaskNotFoundError):
            return self.delays.get(tag=tag, key=key).id
        return None

    def statuses(self, tasks: Iterable[DelayedTask]) -> list[str]:
        return [self.read(task).status.name for task in tasks]

    def counted(self) -> Mapping[Status, int]:
        """Return the number of rows of each status, by counting all rows."""
        return counted(self.store)

    def open_transactions(self) -> int:
        """Return the number of callers' transactions whose tasks are remembered until they end."""
        return len(sessions._waiting)

    # -- what happened ----------------------------------------------------------------------------

    def told(self, name: str) -> list[dict[str, Any]]:
        """Return the fields of the events with this name."""
        return [fields for event_name, fields in self.events if event_name == name]

    def count(self, name: str) -> int:
        """Return what the events with this name count."""
        return self.delays.events.counts[name]

    @contextmanager
    def statements(self) -> Iterator[list[str]]:
        """Yield the list to which each statement of our connections is added."""
        seen: list[str] = []
        with overheard(self.store, lambda statement, _: seen.append(statement)):
            yield seen

    @contextmanager
    def losing_answers(self) -> Iterator[None]:
        """Lose the connection after the commit of each transaction, before the answer comes."""
        database, begin = self.store.database, self.store.database.begin

        @contextmanager
        def lost() -> Iterator[Connection]:
            with begin() as connection:
                yield connection
            raise e.StoreUnavailableError("the connection was lost")

        with mock.patch.object(database, "begin", lost):
            yield

    @contextmanager
    def locked(self, *tasks: DelayedTask) -> Iterator[Connection]:
        """Yield another program's transaction that has locked these rows."""
        t = self.table()
        with self.store.database.tx.connect() as connection, connection.begin() as transaction:
            for task in tasks:  # for a list, MariaDB would lock all rows of a small table
                connection.execute(select(t.c.id).where(t.c.id == task.id).with_for_update())
            yield connection
            if transaction.is_active:
                transaction.rollback()

    # -- the database, as another program uses it -------------------------------------------------

    @property
    def url(self) -> URL:
        return self.store.database.url

    @property
    def kind(self) -> str:
        """The kind of the database: postgresql, mysql or sqlite."""
        name = self.url.get_backend_name()
        return "mysql" if name == "mariadb" else name

    @property
    def has_row_locks(self) -> bool:
        """Whether rows are locked one by one. SQLite has one writer at a time."""
        return self.kind != "sqlite"

    def reconnect(self, *statements: str) -> None:
        """Replace all connections, with these statements at the start of each new one."""
        for engine in (self.store.database.auto, self.store.database.tx):
            if not event.contains(engine, "connect", self._begin):
                event.listen(engine, "connect", self._begin)
        self._first_statements = statements
        self.store.database.dispose()

    def demote(self, *statements: str) -> None:
        """Fill the pools with connections that begin with these statements, as those to a server
        that is no longer the primary. New connections are normal again."""
        self.reconnect(*statements)
        for engine in (self.store.database.auto, self.store.database.tx):
            for connection in [engine.connect() for _ in range(3)]:
                connection.close()
        self._first_statements = ()

    def _begin(self, connection: Any, _record: Any) -> None:
        for statement in self._first_statements:
            with closing(connection.cursor()) as cursor:
                cursor.execute(statement)
            connection.commit()

    def connections(self) -> Iterator[Connection]:
        """Yield a connection of each kind that the instance uses."""
        for engine in (self.store.database.auto, self.store.database.tx):
            with engine.connect() as connection:
                yield connection

    @property
    def can(self) -> Capabilities:
        """What the database can do."""
        return self.store.database.can

    @property
    def engine(self) -> Engine:
        """An engine of the database, for sessions and connections of a caller."""
        return self.store.database.tx

    def begin(self) -> AbstractContextManager[Connection]:
        """Begin a transaction."""
        return self.store.database.begin()

    def rows(self, query: Any) -> Sequence[Any]:
        """Return rows as other transactions see them."""
        return self.store.database.rows(query)

    def table(self, name: str = "tasks") -> Table:
        found: Table = getattr(self.store.schema, name)
        return found


class Worker:
    """A process that claims and runs tasks, one call at a time.

    Parameters
    ----------
    world, name
        The world, and the value of the column `worker`.
    watcher
        Receives the moves of the runs, as the sender of Celery's events does.
    options
        What the main process of a worker says, as attributes of `Processes`. Without options, the
        process has no main process.
    """

    def __init__(self, world: World, name: str, watcher: Any = None, **options: Any) -> None:
        self.name = name
        self.processes = Processes(lambda: world.runtime)
        self.processes.name = lambda pid: name  # type: ignore[method-assign]
        self.processes.is_worker = bool(options)
        vars(self.processes).update({"may_detach": False, **options})
        self._world = world
        self._runner: Runner = self.processes.build_runner(watcher)
        self.claims: Claims = self._runner._claims
        self.admission: Admission = self._runner._admission
        self._call_hooks()

    def _call_hooks(self) -> None:
        world, claims = self._world, self.claims

        def then(claim: Callable[..., Claimed]) -> Any:
            def claim_and_call(*arguments: Any) -> Claimed:
                claimed = claim(*arguments)
                world.after_claim()
                return claimed

            return claim_and_call

        def settle(settlements: Sequence[Settlement], on: Any = None) -> set[int]:
            world.before_settle(settlements)
            return Claims.settle(claims, settlements, on)

        vars(claims).update(claim=then(claims.claim), claim_due=then(claims.claim_due))
        vars(claims)["settle"] = settle

    def claim(self, *tasks: DelayedTask | Entry) -> Claimed:
        entries = [task if isinstance(task, Entry) else Entry.of(task) for task in tasks]
        return self.claims.claim(entries)

    def claim_due(self, queue: str, priorities: Sequence[int], most: int) -> Claimed:
        return self.claims.claim_due(queue, priorities, most)

    def claim_alone(self, task: DelayedTask, version: int | None = None) -> Claimed:
        """Claim a row that may have lost leases."""
        return self.claims.claim_alone(task.id, task.version if version is None else version)

    def claim_recovered(self, queue: str = "default") -> Claimed:
        """Claim one recovered row of a queue."""
        return self.claims.claim_recovered(queue)

    def unclaimed(self, *tasks: DelayedTask) -> dict[int, UnclaimedRow]:
        """Return why a claim did not get these rows."""
        return {row.id: row for row in self.claims.unclaimed([task.id for task in tasks])}

    def settle(self, settlements: Sequence[Settlement]) -> set[int]:
        """End the runs of claimed rows, and return the ids that were accepted."""
        return self.claims.settle(settlements)

    def end(
        self, claimed: Iterable[DelayedTask], move: SettlingMove = "succeed", **end: Any
    ) -> set[int]:
        """End the runs of claimed rows in the same way."""
        return self.settle([Settlement(one, move, **end) for one in claimed])

    def run(self, *tasks: DelayedTask, for_s: float = 0) -> Report:
        self._begin_job()
        return self.run_entries([Entry.of(task) for task in tasks], for_s)

    def run_entries(self, entries: Sequence[Entry], for_s: float = 0) -> Report:
        return self._runner.run(entries, for_s)

    def drain(
        self,
        queue: str = "default",
        most: int = 100,
        priorities: Sequence[int] = ALL_PRIORITIES,
        for_s: float = 0,
        continue_s: float = 0,
    ) -> Report:
        self._begin_job()
        return self._runner.run_due(queue, priorities, most, for_s, continue_s)

    def run_waitlist(self, tag: str, most: int, for_s: float, queue: str = "default") -> Report:
        self._begin_job()
        return self._runner.run_waitlist(queue, tag, most, for_s)

    def _begin_job(self) -> None:
        """Read the policies as a process does that has no main process."""
        self._world.runtime.policy_cache.current()

    def renewed(self, at: float, lease_s: float) -> None:
        """Tell the process that its leases were renewed at a time of its monotonic clock."""
        self.processes.memory.record_renewal(at, at, lease_s)

    def reported(self, at: float, lost_s: float) -> None:
        """Tell the process that its worker has reported."""
        self.processes.memory.record_report(at, at, lost_s)

    def finish(self) -> None:
        """Wait for the rows and settlements that outlive their chunks."""
        self._runner.finish()
