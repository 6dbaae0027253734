"""Settlements: RUNNING to a final status or to the next attempt, with the record of failed
attempts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Select,
    Update,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    update,
)

from delaytasks.db.database import Database
from delaytasks.db.rows import (
    at_place,
    by_id,
    each_listed,
    instant_text,
    json_rows,
    list_of,
    move_locked,
    moved,
    next_version,
    parts,
    shared_name,
    shared_parameter,
)
from delaytasks.db.schema import RESULT, Schema
from delaytasks.db.statements import Prepared, skipping_insert
from delaytasks.db.task_keys import TaskKeys
from delaytasks.db.types import db_now, db_now_plus, latest, once, unindexed
from delaytasks.model.body import MARK_LENGTH, PREFIX, dump_json, marks_of
from delaytasks.model.clock import to_us
from delaytasks.model.moves import FINISHED, Status, following
from delaytasks.model.task import Attempt, CallerConnection, DelayedTask, Entry, Settlement
from delaytasks.model.text import NO_KEY, NO_PROCESSOR, NO_TIME_LIMITS, is_deferred_until

# -- Failed attempts, one row each. A task that succeeds at its first attempt has no row here -----


#: The last attempts of each task are kept.
KEPT_ATTEMPTS = 50


class Attempts:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._a = a = schema.attempts
        made = skipping_insert(database)
        # A settlement whose answer was lost is sent again, and then its attempt exists already.
        row = made(a).on_conflict_do_nothing() if made else insert(a).prefix_with("IGNORE")
        self._add = row.values(ended=db_now())
        versions = select(a.c.version).where(a.c.task_id == bindparam("of"))
        # MySQL reads a table that the statement changes only in a derived table.
        first_old = versions.order_by(a.c.version.desc()).offset(KEPT_ATTEMPTS).limit(1).subquery()
        self._drop_old = delete(a).where(
            a.c.task_id == bindparam("of"), a.c.version <= select(first_old).scalar_subquery()
        )

    def record(self, on: Any, failed: Sequence[Settlement], worker: str) -> None:
        self._write(
            on, [(s.task.id, s.task.version, s.task.runs, s.began, worker, s.error) for s in failed]
        )

    def record_lost_leases(self, on: Any, rows: Iterable[Any], error: str) -> None:
        """Write the runs that lost their lease; `rows` are rows of the task table."""
        self._write(
            on, [(r.id, r.version, r.runs, r.execution_time, r.worker, error) for r in rows]
        )

    def _write(self, on: Any, attempts: Sequence[tuple[Any, ...]]) -> None:
        names = ("task_id", "version", "attempt", "began", "worker", "error")
        on.execute(self._add, [dict(zip(names, values, strict=True)) for values in attempts])
        old = [{"of": id} for id, _, number, *_ in attempts if number > KEPT_ATTEMPTS]
        if old:
            on.execute(self._drop_old, old)

    def of(self, on: Any, id: int) -> list[Attempt]:
        a = self._a
        columns = (a.c.attempt, a.c.began, a.c.ended, a.c.worker, a.c.error)
        rows = on.execute(select(*columns).where(a.c.task_id == id).order_by(a.c.version))
        # The worker estimates the database's time for `began`, within a fraction of a millisecond,
        # and the database writes `ended`.
        return [
            Attempt(number, began and min(began, ended), ended, worker, error)
            for number, began, ended, worker, error in rows
        ]

    def forget(self, on: Any, ids: Sequence[int]) -> None:
        on.execute(delete(self._a).where(self._a.c.task_id.in_(ids)))


#: The columns that a row must match. They are columns of the parameter `rows` even if all rows have
#: the same value, since constants would lead planners to the index of all running rows.
_FENCE = ("id", "version", "old_status")
#: The columns with new values.
_NEW = (
    "status",
    "error_stack",
    "result",
    "execution_time",
    "expected_time",
    "due_time",
    "uncounted",  # 1 if the run is no attempt: the claim has counted it already
    "never_ran",
    "late_by",
)
_INSTANTS = {"execution_time", "expected_time", "due_time"}
#: The columns in which rows that end alike have the same new value, and the parameters for these.
_SHARED_END = {name: shared_name(name) for name in _NEW if name != "execution_time"}
_VERSION_OF_ALL = shared_name("version")


class Settlements:
    """The settlements of one process.

    Rows end alike if they get the same new values, except for the time when they began, and if no
    value is a text or a due time. Most rows of a chunk do. Their shared values are passed once
    (decision 0035). `_statement_for` chooses one of three statements:

    | statement       | the rows                         | passed for each row                    |
    |-----------------|----------------------------------|----------------------------------------|
    | `_same_version` | end alike, have the same version | the id and the start time, in lists    |
    | `_same_end`     | end alike                        | `_FENCE` and the start time, as JSON   |
    | `_any_end`      | may end differently              | `_FENCE` and all new values, as JSON   |

    `_same_version` is None if the database does not look up lists (SQLite).
    """

    def __init__(self, database: Database, schema: Schema, worker: str) -> None:
        self._db = database
        self._t = schema.tasks
        self._cipher = schema.cipher
        self._keys = TaskKeys(database, schema)
        self._attempts = Attempts(database, schema)
        self._worker = worker
        self._same_version = self._by_list() if database.can.looks_up_lists else None
        self._same_end = self._by_rows(["execution_time"])
        self._any_end = self._by_rows(_NEW)

    def _by_rows(self, own: Sequence[str]) -> Prepared:
        t = self._t
        w = json_rows(self._db, (*_FENCE, *own))
        new = {name: w.c[name] if name in own else shared_parameter(name) for name in _NEW}
        statement = self._ended(new).where(
            t.c.id == w.c.id, t.c.version == w.c.version, t.c.status == w.c.old_status
        )
        # Without the list MySQL reads all rows of a small table, and waits for each locked one.
        return Prepared(self._db, statement.where(each_listed(self._db, t.c.id)))

    def _by_list(self) -> Prepared:
        t = self._t
        new: dict[str, Any] = {name: shared_parameter(name) for name in _NEW}
        new["execution_time"] = at_place(self._db, t.c.id, "execution_time")
        is_ours = (
            t.c.version == shared_parameter("version"),
            unindexed(t.c.status) == int(Status.RUNNING),
        )
        return Prepared(
            self._db, by_id(self._ended(new).where(each_listed(self._db, t.c.id), *is_ours), t)
        )

    def _ended(self, new: Mapping[str, ColumnElement[Any]]) -> Update:
        t, never_ran = self._t, new["never_ran"] == 1
        return update(t).values(
            status=new["status"],
            version=next_version(t.c.version),
            error_stack=new["error_stack"],
            result=new["result"],
            # A row that is given back never ran, on any worker. The process's clock may be some
            # milliseconds behind the clock of the claim.
            execution_time=case(
                (never_ran, None), else_=latest(new["execution_time"], t.c.execution_time)
            ),
            worker=case((never_ran, None), else_=t.c.worker),
            ip_address=case((never_ran, None), else_=t.c.ip_address),
            expected_time=func.coalesce(new["expected_time"], t.c.expected_time),
            due_time=new["due_time"],
            runs=t.c.runs - new["uncounted"],
            lapses=case((never_ran, t.c.lapses), else_=0),
            lease_until=None,
            late_by=new["late_by"],
            update_time=db_now(),
        )

    def settle(self, settlements: Sequence[Settlement], on: Any = None) -> set[int]:
        """Settle rows, in the transaction of the connection `on` if it is given.

        Return the ids that were accepted. This process had lost the leases of the other ones.
        """
        accepted: set[int] = set()
        for part in _parts(settlements):
            accepted |= self._settle_part(part) if on is None else self._together(on, part)
        return accepted

    def complete(self, task: DelayedTask, result: str | None, on: CallerConnection) -> bool:
        """Settle a running task in its processor's own transaction.

        Return False if its lease was lost.
        """
        self._keys.release(on, task)  # keys before tasks
        statement, parameters = self._statement_for([Settlement(task, "succeed", result=result)])
        # Not prepared, since the connection is the caller's.
        return bool(on.execute(statement.statement, parameters).rowcount)

    def _settle_part(self, ordered: Sequence[Settlement]) -> set[int]:
        if not any(s.ending.is_failure or _may_release_key(s) for s in ordered):
            return self._db.autocommitted(lambda c: self._settled(c, ordered))
        return self._db.transaction(lambda c: self._together(c, ordered))

    def _together(self, on: Any, ordered: Sequence[Settlement]) -> set[int]:
        # Keys before tasks, in the order of a replacement: the other order would lead to deadlocks.
        owners = self._lock_keys(on, ordered)
        settlements = [self._unless_replaced(s, owners) for s in ordered]
        accepted = self._settled(on, settlements)
        over = [s for s in settlements if s.task.id in accepted]
        self._keys.release_all(
            on, [_named(s) for s in over if s.task.id in owners and s.target in FINISHED]
        )
        if failed := [s for s in over if s.ending.is_failure]:
            self._attempts.record(on, failed, self._worker)
        return accepted

    def _lock_keys(self, on: Any, settlements: Sequence[Settlement]) -> set[int]:
        """Lock the keys, and return the ids of the tasks that still own theirs."""
        named = [_named(s) for s in settlements if _may_release_key(s)]
        return {row[0] for row in self._keys.lock_all(on, named, skip_locked=False)}

    @staticmethod
    def _unless_replaced(settlement: Settlement, owners: set[int]) -> Settlement:
        """Return the settlement; a task that would run again fails if it has lost its key."""
        task = settlement.task
        runs_again = settlement.target is Status.NOT_COMPLETE and settlement.ending.has_run
        if not runs_again or task.key is None or task.id in owners:
            return settlement
        why = f"Not run again: its key {task.key!r} went to another task."
        error = f"{settlement.error or settlement.move}\n{why}"
        return settlement._replace(move="fail", error=error, expected_time=None)

    def _new_values(self, settlement: Settlement) -> tuple[Any, ...]:
        return (
            settlement.task.id,
            settlement.task.version,
            int(Status.RUNNING),
            int(settlement.target),
            settlement.error,
            self._kept(settlement.result, settlement.task),
            settlement.began,
            settlement.expected_time,
            # No other move changes a running row, so its due time is still the claimed one.
            settlement.due_time
            if settlement.expected_time is not None
            else settlement.task.due_time,
            int(not settlement.ending.is_attempt),
            int(not settlement.ending.has_run),
            settlement.task.late_by,
        )

    def _kept(self, result: str | None, task: DelayedTask) -> str | None:
        if result is None or self._cipher is None:
            return result
        return self._cipher.seal(result, RESULT, task.id, task.tag)

    def _settled(self, connection: Any, ordered: Sequence[Settlement]) -> set[int]:
        statement, parameters = self._statement_for(ordered)
        if statement(connection, parameters).row_count == len(ordered):
            return set(parameters["ids"])
        # Some leases were lost, or an earlier try of the same settlement was committed and its
        # answer was lost.
        expected = {s.task.id: _after(s) for s in ordered}
        t = self._t.c
        query = select(t.id, t.version, t.status, t.lapses).where(t.id.in_(list(expected)))
        return {row[0] for row in connection.execute(query) if tuple(row[1:]) == expected[row[0]]}

    def _statement_for(self, ordered: Sequence[Settlement]) -> tuple[Prepared, dict[str, Any]]:
        """Return the statement that makes these settlements, and its parameters."""
        values = zip(*map(self._new_values, ordered), strict=True)
        columns = dict(zip((*_FENCE, *_NEW), values, strict=True))
        parameters = list_of(self._db, list(columns["id"]))
        if not all(_is_shared(columns[name]) for name in _SHARED_END):
            parameters["rows"] = self._rows(columns, (*_FENCE, *_NEW))
            return self._any_end, parameters
        for name, parameter in _SHARED_END.items():
            parameters[parameter] = columns[name][0]
        if self._same_version is None or not _is_shared(columns["version"]):
            parameters["rows"] = self._rows(columns, (*_FENCE, "execution_time"))
            return self._same_end, parameters
        parameters[_VERSION_OF_ALL] = columns["version"][0]
        parameters["execution_time"] = list(columns["execution_time"])
        return self._same_version, parameters

    def _rows(self, columns: Mapping[str, Sequence[Any]], names: Sequence[str]) -> str:
        """Return these columns as the JSON parameter of `json_rows`."""
        values = [
            [instant_text(self._db, at) for at in columns[name]]
            if name in _INSTANTS
            else columns[name]
            for name in names
        ]
        return dump_json([dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)])


def _after(settlement: Settlement) -> tuple[int, int, int]:
    """Return the version, status and lapses that this settlement leaves.

    A lost lease leaves other ones.
    """
    task, has_run = settlement.task, settlement.ending.has_run
    return following(task.version), int(settlement.target), 0 if has_run else task.lapses


def _is_shared(values: Sequence[Any]) -> bool:
    """Whether all are None or the same number.

    Texts are not shared, since MariaDB would use a temporary table on disk.
    """
    first = values[0]
    if first is not None and not isinstance(first, int):
        return False
    return values.count(first) == len(values)


def _may_release_key(settlement: Settlement) -> bool:
    return settlement.task.key is not None and settlement.move != "give_back"


def _named(settlement: Settlement) -> tuple[int, str, str | None]:
    return settlement.task.id, settlement.task.tag, settlement.task.key


def _parts(settlements: Sequence[Settlement]) -> Iterator[list[Settlement]]:
    """Split the settlements in the order of their ids."""
    ordered = sorted(settlements, key=lambda settlement: settlement.task.id)
    return parts(ordered, lambda s: len(s.error.encode(errors="replace")) if s.error else 0)


# -- deferred rows --------------------------------------------------------------------------------

# Rows that were deferred because no worker had a processor for their tag, or the key of their
# body.
#
# A worker that has the processor or the key brings them forward.


DEFERRED_BATCH_ROWS = 500


class DeferredRows:
    def __init__(self, database: Database, schema: Schema) -> None:
        self._db = database
        self._t = schema.tasks
        self._marks = [] if schema.cipher is None else marks_of(schema.cipher.names)

    def bring_forward(
        self, tags: Sequence[str], queues: Sequence[str] | None, within_s: float
    ) -> list[Entry]:
        """Make deferred rows of these tags and queues due now, and return them.

        Rows that are next tried within `within_s` seconds are considered. `queues` is None for all
        queues. A row that was rescheduled or touched meanwhile keeps the due time of that call.
        """
        t, brought = self._t, list[Entry]()
        query = self._deferred(tags, queues, within_s)
        # A touch may have made the task due later than now.
        due = case((t.c.due_time > db_now(), t.c.due_time), else_=db_now())
        change = update(t).values(moved(t, "reschedule", expected_time=due))

        def step(on: Any, since: Any) -> tuple[list[Entry], Any]:
            """Bring a batch forward. Return its entries, and where the next one starts."""
            rows = on.execute(query.where(t.c.expected_time > since)).all()
            found = [row for row in rows if is_deferred_until(row.error_stack, row.expected_time)]
            if found:
                move_locked(on, change, [row.id for row in found], "deferred rows")
                now = on.execute(select(db_now())).scalar_one()
            entries = [
                Entry(
                    *(row.id, following(row.version), to_us(max(now, row.due_time or now))),
                    *(row.queue, row.priority),
                )
                for row in found
            ]
            return entries, rows[-1].expected_time if len(rows) == DEFERRED_BATCH_ROWS else None

        since: Any = once(db_now())
        while since is not None:
            entries, since = self._db.transaction(partial(step, since=since))
            brought += entries
        return brought

    def _deferred(
        self, tags: Sequence[str], queues: Sequence[str] | None, within_s: float
    ) -> Select[Any]:
        """Return the query that locks a batch of deferred rows, in the order of their tries."""
        t = self._t.c
        is_why = or_(
            t.error_stack.startswith(NO_PROCESSOR),
            t.error_stack.startswith(NO_TIME_LIMITS),
            and_(t.error_stack.startswith(NO_KEY), self._is_readable()),
        )
        query = (
            select(t.id, t.version, t.expected_time, t.queue, t.priority, t.error_stack, t.due_time)
            .where(unindexed(t.status) == int(Status.NOT_COMPLETE), is_why, t.tag.in_(tags))
            .where(t.expected_time <= once(db_now_plus(within_s)))
            .order_by(t.expected_time)
            .limit(DEFERRED_BATCH_ROWS)
            .with_for_update(skip_locked=True)
        )
        return query if queues is None else query.where(t.queue.in_(queues))

    def _is_readable(self) -> ColumnElement[bool]:
        """Whether this process has the key that the body names now: it may have changed since the
        deferral."""
        body = self._t.c.message_body
        is_plain = func.substr(body, 1, len(PREFIX)) != PREFIX
        return or_(is_plain, func.substr(body, 1, MARK_LENGTH + 1).in_(self._marks))
