"""Claims and settlements, the two moves of every run.

A claim moves rows from NOT_COMPLETE to RUNNING, by ids or by due time, in one statement where
possible. A settlement moves them on to a final status or to the next attempt, fenced by the version
that the claim returned.

The statements of claims are texts. `ClaimTexts` has them as SQLite writes them, its subclasses what
others write differently, and `tests/conformance/claims.sql` shows all texts of all databases. On
PostgreSQL, rows that a message names are claimed by this statement:

    UPDATE yb_delay_task_message
    SET status = 3,
        version = CASE
            WHEN version < CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
            THEN CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)
            ELSE CASE WHEN version < 4611686018427387904 THEN version + 1 ELSE 0 END
                + CAST(floor(random() * 2147483647) AS BIGINT)
        END,
        runs = CASE WHEN runs < 2147483647 THEN runs + 1 ELSE runs END,
        execution_time = clock_timestamp(),
        update_time = clock_timestamp(),
        lease_until = clock_timestamp() + 60.0 * interval '1 second',
        worker = :worker,
        ip_address = 2130706433
    WHERE id = ANY (ARRAY(
        SELECT id FROM yb_delay_task_message
        WHERE id = ANY (:ids) AND id BETWEEN :first AND :last
            AND version = :version AND status + 0 = :status AND lapses <= :lapses
            AND expected_time <= clock_timestamp()
        ORDER BY id
        FOR UPDATE SKIP LOCKED
    ))
    AND id BETWEEN :first AND :last
    AND (SELECT set_config('synchronous_commit',
        CASE current_setting('synchronous_standby_names')
            WHEN '' THEN 'off' ELSE current_setting('synchronous_commit') END, true)) IS NOT NULL
    RETURNING id, tag, message_body, expected_time, status, version, queue, priority, task_key,
        delay_time, runs, lapses, headers, limit_key, create_time, due_time, meta, cancel_request,
        late_by
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    String,
    Table,
    Update,
    bindparam,
    case,
    func,
    select,
    text,
    update,
)

from delaytasks.db.database import Database
from delaytasks.db.schema import (
    CLAIMED,
    MAX_INTEGER,
    RESULT,
    Schema,
    at_place,
    by_id,
    check_row_count,
    columns,
    each_listed,
    hot_index,
    id_list,
    instant_text,
    json_query,
    json_rows,
    next_version,
    shared_name,
    shared_parameter,
    type_of,
)
from delaytasks.db.statements import Prepared, parts, task_of
from delaytasks.db.task_rows import Attempts, TaskKeys
from delaytasks.db.types import UTCDateTime, db_now, for_database, latest, unindexed
from delaytasks.model.body import dump_json
from delaytasks.model.clock import EARLIEST, monotonic, to_us
from delaytasks.model.inputs import MAX_PRIORITY
from delaytasks.model.moves import FINISHED, MOST_VERSIONS, MOVES, LateReason, Status, following
from delaytasks.model.policies import NO_WAITLISTS, PolicyCache, WaitlistsSeen
from delaytasks.model.task import CallerConnection, Claimed, DelayedTask, Entry, Settlement

# -- The texts of the statements ------------------------------------------------------------------


_FOLLOWING = f"CASE WHEN version < {MOST_VERSIONS} THEN version + 1 ELSE 0 END"
_POSTGRESQL_US = "CAST(extract(epoch FROM (SELECT clock_timestamp())) * 1000000 AS BIGINT)"
_SQLITE_INSTANT = "'%Y-%m-%d %H:%M:%f000', 'now'"


class ClaimTexts:
    """The texts of the claims on one table. `values` has the new values of a claimed row.

    The attributes and the methods up to `is_chosen` are the parts that databases write differently,
    here for SQLite.
    """

    #: The clock of the statement.
    now = f"strftime({_SQLITE_INSTANT})"
    #: The version of a claimed row.
    version = _FOLLOWING
    #: The condition for the ids of `list_of`.
    is_listed = "id IN :ids"
    #: Names the rows of the JSON parameter `rows` also as a list. Without it PostgreSQL would scan
    #: a table that was never analysed.
    is_also_listed = ""
    #: The condition for a range that contains the listed ids, for UPDATEs whose plan is kept. Such
    #: a plan can choose partitions by a range, but not by a list.
    is_in_range = ""
    #: The condition for rows of the queue `:queue`, of which the planner has to assume that few
    #: meet it (`is_narrow` of `types.py` explains how).
    is_of_queue = "queue = :queue"
    #: The condition for due rows, of which it has to assume the same (`is_past` of `types.py`).
    is_due = f"expected_time <= (SELECT {now})"
    #: Ends a query, so that it locks its rows and leaves out locked ones. SQLite has one writer.
    lock = ""
    #: A condition that is true, and lets the transaction end before its changes are on the disk.
    commits_asynchronously = ""

    def __init__(self, database: Database, tasks: Table, lease_s: float, ip: int | None) -> None:
        quoted = database.url.get_dialect()().identifier_preparer.format_table(tasks)
        self._tasks = quoted.replace(":", r"\:")  # a colon would begin a parameter
        self._hot_index = hot_index(tasks)
        self._json_query = json_query(
            database, ("wanted_id", "wanted_version", "wanted_status", "most_lapses")
        )
        self._returns_rows = database.can.update_returning
        # `Claims._claim_locked` makes the same changes to tasks that a query has locked.
        self.values = {
            "status": f"{MOVES['claim'].target:d}",
            "version": self.version,
            # Larger numbers are another program's, and must not fail the statement.
            "runs": f"CASE WHEN runs < {MAX_INTEGER} THEN runs + 1 ELSE runs END",
            "execution_time": self.now,
            "update_time": self.now,
            "lease_until": self.now_plus(lease_s),
            "worker": ":worker",
            "ip_address": "NULL" if ip is None else f"{ip:d}",
        }

    def now_plus(self, seconds: float) -> str:
        """The clock of the statement plus some seconds."""
        return f"strftime({_SQLITE_INSTANT}, '{seconds:+.6f} seconds')"

    def use_index(self, name: str) -> str:
        """Let MySQL use the index `name`.

        Otherwise MySQL scans a small table, and locks each row that it reads for a moment. A claim
        of another queue skips such a row.
        """
        return ""

    def is_chosen(self, query: str) -> str:
        """The condition for the rows whose ids this query chooses."""
        return f"id IN ({query})"

    # -- the ways to choose rows ------------------------------------------------------------------

    def listed(self, shown: str) -> str:
        """Choose due rows of `ids` that have the same version."""
        return f"""
            SELECT {shown} FROM {self._tasks} {self.use_index("PRIMARY")}
            WHERE {self.is_listed} AND {self._fence(":version", ":status", ":lapses")}
            ORDER BY id {self.lock}"""

    def joined(self, shown: str) -> str:
        """Choose due rows that the JSON parameter `rows` names."""
        # The status and the lapses are columns, although most have the same value in all rows: with
        # constants planners would expect one row, and compare all rows with each other.
        return f"""
            SELECT {shown} FROM {self._tasks} {self.use_index("PRIMARY")}
            JOIN ({self._json_query}) AS w ON id = wanted_id
            WHERE {self._fence("wanted_version", "wanted_status", "most_lapses")}
            {self.is_also_listed} ORDER BY id {self.lock}"""

    def oldest(self, shown: str) -> str:
        """Choose the oldest rows of a level that have been due since the instant `due_from`, and
        have lost no lease."""
        # PostgreSQL's clock_timestamp() may differ from row to row. As a subquery it is evaluated
        # once, so it can search an index.
        return f"""
            SELECT {shown} FROM {self._level()}
            AND expected_time BETWEEN :due_from AND (SELECT {self.now}) AND lapses = 0
            ORDER BY expected_time LIMIT :most {self.lock}"""

    def recovered(self, shown: str) -> str:
        """Choose the due row of a level that lost the fewest leases, of these the oldest."""
        # In the order of time alone MySQL would also read the index of all past rows.
        return f"""
            SELECT {shown} FROM {self._level()} AND {self.is_due} AND lapses > 0
            ORDER BY lapses, expected_time LIMIT 1 {self.lock}"""

    def _fence(self, version: str, status: str, lapses: str) -> str:
        """The condition for a due row that is unchanged."""
        # As an expression the status uses no index: planners would read all rows that wait.
        return f"""version = {version} AND status + 0 = {status} AND lapses <= {lapses}
            AND expected_time <= {self.now}"""

    def _level(self) -> str:
        return f"""{self._tasks} {self.use_index(self._hot_index)}
            WHERE status = {Status.NOT_COMPLETE:d} AND {self.is_of_queue}
            AND priority = :priority"""

    # -- the change -------------------------------------------------------------------------------

    def claim(self, query: str, is_planned_once: bool) -> str:
        """Claim the rows whose ids this query chooses."""
        is_in_range = self.is_in_range if is_planned_once else ""
        where = filter(None, (self.is_chosen(query), is_in_range, self.commits_asynchronously))
        return self._update(" AND ".join(where), f"RETURNING {', '.join(CLAIMED)}")

    def claim_locked(self) -> str:
        """Claim rows of `ids`, which the transaction has locked."""
        returning = "RETURNING id, version" if self._returns_rows else ""
        return self._update(self.is_listed, returning)

    def _update(self, where: str, returning: str) -> str:
        new = ", ".join(f"{name} = {value}" for name, value in self.values.items())
        use_index = self.use_index("PRIMARY")
        return f"UPDATE {self._tasks} {use_index} SET {new} WHERE {where} {returning}"


class PostgresqlTexts(ClaimTexts):
    now = "clock_timestamp()"
    # An asynchronous commit of a claim may be lost in a crash. The next claim of the row must then
    # have another version, or the settlement of the first worker would end the run of the second
    # one. The version is therefore the time of the claim in microseconds. If the row has a later
    # version, because the clock was set back, a random number is added.
    version = f"""CASE WHEN version < {_POSTGRESQL_US} THEN {_POSTGRESQL_US}
        ELSE {_FOLLOWING} + CAST(floor(random() * {MAX_INTEGER}) AS BIGINT) END"""
    is_listed = "id = ANY (:ids) AND id BETWEEN :first AND :last"
    is_also_listed = f"AND {is_listed}"
    is_in_range = "id BETWEEN :first AND :last"
    is_of_queue = "queue = :queue AND queue BETWEEN (SELECT :queue) AND (SELECT :queue)"
    is_due = """expected_time BETWEEN (SELECT CAST('-infinity' AS TIMESTAMPTZ))
        AND (SELECT clock_timestamp())"""
    lock = "FOR UPDATE SKIP LOCKED"
    # PostgreSQL writes the changes within three times `wal_writer_delay`, 0.6 seconds by default.
    # If it crashes before, they are lost. If the server has synchronous standbys, the transaction
    # waits as without this condition, because a failover would lose all that no standby has.
    commits_asynchronously = """(SELECT set_config('synchronous_commit',
        CASE current_setting('synchronous_standby_names')
        WHEN '' THEN 'off' ELSE current_setting('synchronous_commit') END, true)) IS NOT NULL"""

    def now_plus(self, seconds: float) -> str:
        return f"clock_timestamp() + {seconds} * interval '1 second'"

    def is_chosen(self, query: str) -> str:
        # The array is made first, so that the planner can only look up each id.
        return f"id = ANY (ARRAY({query}))"


class MysqlTexts(ClaimTexts):
    now = "UTC_TIMESTAMP(6)"
    is_due = "expected_time <= (SELECT UTC_TIMESTAMP(6))"
    lock = "FOR UPDATE SKIP LOCKED"

    def now_plus(self, seconds: float) -> str:
        return f"UTC_TIMESTAMP(6) + INTERVAL {round(seconds * 1_000_000)} MICROSECOND"

    def use_index(self, name: str) -> str:
        return f"FORCE INDEX (`{name}`)"


# -- Settlements: RUNNING to a final status or to the next attempt --------------------------------

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
    (decision 0004). `_statement_for` chooses one of three statements:

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
        # If a row stays locked, the runner settles each row by itself. Meanwhile the leases of the
        # other ones would end.
        repeat = partial(self._db.repeat, waits_for_locks=False)
        if not any(s.ending.is_failure or _may_release_key(s) for s in ordered):
            return repeat(lambda c: self._settled(c, ordered), self._db.connect)
        return repeat(lambda c: self._together(c, ordered), self._db.begin)

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
        ending = settlement.ending
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
            int(not ending.is_attempt),
            int(not ending.has_run),
            settlement.task.late_by if settlement.move != "give_back" else _if_held(settlement),
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


def list_of(database: Database, ids: list[int]) -> dict[str, Any]:
    """Return the parameters of a sorted list of ids."""
    if not database.can.arrays:
        return {"ids": ids}
    return {"ids": ids, "first": ids[0], "last": ids[-1]}


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


def _if_held(settlement: Settlement) -> int | None:
    """Return what `late_by` says of a row that is given back: that it was held, if it was.

    A row that is deferred has a later reason.
    """
    late_by = settlement.task.late_by
    is_held = late_by is not None and late_by % 10 == LateReason.HELD
    return int(LateReason.HELD) if is_held and settlement.expected_time is None else None


def _may_release_key(settlement: Settlement) -> bool:
    return settlement.task.key is not None and settlement.move != "give_back"


def _named(settlement: Settlement) -> tuple[int, str, str | None]:
    return settlement.task.id, settlement.task.tag, settlement.task.key


def _parts(settlements: Sequence[Settlement]) -> Iterator[list[Settlement]]:
    """Split the settlements in the order of their ids."""
    ordered = sorted(settlements, key=lambda settlement: settlement.task.id)
    return parts(ordered, lambda s: len(s.error.encode(errors="replace")) if s.error else 0)


# -- The claims -----------------------------------------------------------------------------------

#: No row has more lapses.
ANY_LAPSES = MAX_INTEGER
#: Holds those of the locked rows for which there is no capacity. Returns the ids of the other ones.
HoldExcess = Callable[[Any, Sequence[DelayedTask]], tuple[list[int], WaitlistsSeen]]


#: How often a search for the oldest rows starts at the beginning of the index.
RESTART_S = 5.0
#: The parameters that are named as the column that has their type.
_PARAMETERS = ("version", "status", "lapses", "queue", "priority")


class UnclaimedRow(NamedTuple):
    """A task that a message named and that the claim did not get."""

    id: int
    version: int
    status: Status
    due_us: int
    lapses: int


class Reached(NamedTuple):
    """How far the claims of a level have come in the index of due times."""

    #: The due time of the last claimed row, where the next search starts.
    due_from: datetime
    #: When a search starts at the beginning again. Full claims do not extend this time: in a long
    #: backlog all claims are full, and rows that came back with older due times would starve.
    restart_at: float


class Choice(NamedTuple):
    """One way to choose rows, with the statements that claim them."""

    #: Locks the rows, and returns them as they are.
    lock: Prepared
    #: Claims the rows in a transaction of its own, which commits asynchronously if the database
    #: can, and returns them; None if the database has no `UPDATE ... RETURNING`.
    claim: Prepared | None


class Claims(Settlements):
    """The claims and settlements of one process; `worker` and `ip` are written into the rows.

    `policies` are those that the process knows. Without them no tag has limits.

    Two workers cannot both win a row, although both may have its message. Each claim locks the rows
    that it chooses, and checks under the lock that their status is NOT_COMPLETE and, for a row that
    a message names, that their version is still the one in the message:

    - While the first worker has the lock, the second one skips the row (`SKIP LOCKED`). SQLite has
      one writer at a time, so the second worker waits for the first one's commit.
    - After the first worker's commit, the row is RUNNING, and its version is higher. The second
      worker's condition no longer matches, so it gets no row.
    - Lock, check and change are one statement, or statements of one transaction where the database
      has no `UPDATE ... RETURNING` or a tag has limits. Therefore no worker acts on an old check.

    A worker that loses its lease loses the row by the same version: recovering the row changes the
    version, so a later settlement of the first worker changes no row (`Settlements`).

    On PostgreSQL, a claim without limits does not wait for the disk. If the server crashes within
    the next moments, the row waits again as before the claim, and another worker claims it. The
    first worker's settlement then changes no row either, because no two claims have the same
    version (`PostgresqlTexts.version`).
    """

    #: Holds the rows beyond the limits of their tags: `Admission.hold_excess`. The constructor of
    #: `Admission`, in `limits/admission.py`, sets it.
    hold_excess: HoldExcess

    def __init__(
        self,
        database: Database,
        schema: Schema,
        worker: str,
        ip: int | None,
        lease_s: float,
        policies: PolicyCache | None,
    ) -> None:
        super().__init__(database, schema, worker)
        self._schema = schema
        self._policies = policies
        self.columns = columns(schema, CLAIMED)
        made = for_database(
            database.backend, postgresql=PostgresqlTexts, mysql=MysqlTexts, sqlite=ClaimTexts
        )
        self._texts = texts = made(database, schema.tasks, lease_s, ip)
        self._parameters: list[BindParameter[Any]] = [
            id_list(database),
            bindparam("worker", worker, String),
            bindparam("due_from", type_=UTCDateTime),
            *(bindparam(name, type_=type_of(name)) for name in _PARAMETERS),
        ]
        self._listed = self._choice(texts.listed, True) if database.can.looks_up_lists else None
        self._joined = self._choice(texts.joined, True)
        # Planned at each execution, because a kept plan would guess the number of due rows.
        self._oldest = self._choice(texts.oldest)
        self._recovered = self._choice(texts.recovered)
        self._locked = self._prepared(texts.claim_locked(), ("id", "version"), True)
        self._reached: dict[tuple[str, int], Reached] = {}

    def _choice(self, chosen: Callable[[str], str], is_planned_once: bool = False) -> Choice:
        lock = self._prepared(chosen(", ".join(CLAIMED)), CLAIMED, is_planned_once)
        if not self._db.can.update_returning:
            return Choice(lock, None)
        claim = self._texts.claim(chosen("id"), is_planned_once)
        return Choice(lock, self._prepared(claim, CLAIMED, is_planned_once))

    def _prepared(self, sql: str, returned: Sequence[str], is_planned_once: bool) -> Prepared:
        """Return a statement whose parameters and columns have their types.

        Without them SQLite would compare instants wrongly, and return texts.
        """
        given = [one for one in self._parameters if f":{one.key}" in sql]
        statement = text(sql).bindparams(*given).columns(*columns(self._schema, returned))
        return Prepared(self._db, statement, is_planned_once)

    # -- choose -----------------------------------------------------------------------------------

    def _named(
        self,
        pairs: Sequence[tuple[int, int]],
        lapses: int = 0,
        status: Status = Status.NOT_COMPLETE,
    ) -> tuple[Choice, dict[str, Any]]:
        """Choose the ids and versions that are due, with at most `lapses` lost leases."""
        pairs = sorted(set(pairs))  # a row that is named twice would be found twice
        parameters = list_of(self._db, [id for id, _ in pairs])
        if self._listed is not None and len({version for _, version in pairs}) == 1:
            shared = {"version": pairs[0][1], "status": int(status), "lapses": lapses}
            return self._listed, parameters | shared
        shared = {"wanted_status": int(status), "most_lapses": lapses}
        rows = [{"wanted_id": id, "wanted_version": version, **shared} for id, version in pairs]
        return self._joined, parameters | {"rows": dump_json(rows)}

    # -- claim ------------------------------------------------------------------------------------

    def claim(self, entries: Sequence[Entry]) -> Claimed:
        """Claim the entries that are due, unchanged and not locked. Recovered rows are left out."""
        if not entries:
            return Claimed()
        pairs = [(entry.id, entry.version) for entry in entries]
        return self._claim(*self._named(pairs))

    def claim_alone(self, id: int, version: int) -> Claimed:
        """Claim one row, even a recovered one, which may kill its worker."""
        return self._claim(*self._named([(id, version)], ANY_LAPSES))

    def claim_due(self, queue: str, priorities: Sequence[int], limit: int) -> Claimed:
        """Claim the oldest due rows of the highest priorities, without messages: at most `limit`
        rows of all priorities together. Recovered rows are left out."""
        claimed = Claimed()
        for priority in sorted(priorities, reverse=True):
            claimed.add(self._claim_level(queue, priority, limit - len(claimed)))
            if len(claimed) >= limit:
                break
        return claimed

    def _claim_level(self, queue: str, priority: int, limit: int) -> Claimed:
        """Claim up to `limit` due rows of a queue and priority from where the last claim ended.

        A claimed row leaves a dead entry in the index. The database cannot remove it while an older
        transaction is open, such as a backup's. Walking past all dead entries would slow down every
        chunk, so a chunk continues where the last one ended. Rows with older due times may come
        back meanwhile: the index is searched from its beginning each `RESTART_S`, and before a
        level is reported as empty.

        A row that a process has given back has as many lapses as before, usually none, and is found
        here. A recovered one has another lapse. It may kill its process, so it is left out here,
        and `claim_recovered` claims it alone.
        """
        if self._has_limits:  # the claim holds some of the rows that it finds
            return self._claim_oldest(queue, priority, limit)
        now, level = monotonic(), (queue, priority)
        reached = self._reached.get(level)
        if reached is None or reached.restart_at <= now:
            reached = Reached(EARLIEST, now + RESTART_S)
        claimed = self._claim_oldest(queue, priority, limit, reached.due_from)
        if reached.due_from > EARLIEST and len(claimed) < limit:
            older = self._claim_oldest(queue, priority, limit - len(claimed))
            claimed = Claimed([*older, *claimed])
        if claimed and len(claimed) >= limit:
            latest = max(task.expected_time for task in claimed)
            self._reached[level] = reached._replace(due_from=latest)
        else:
            self._reached.pop(level, None)
        return claimed

    def _claim_oldest(
        self, queue: str, priority: int, limit: int, due_from: datetime = EARLIEST
    ) -> Claimed:
        level = {"queue": queue, "priority": priority, "most": limit, "due_from": due_from}
        return self._claim(self._oldest, level)

    def claim_recovered(
        self, queue: str, priorities: Sequence[int] = range(MAX_PRIORITY + 1)
    ) -> Claimed:
        """Claim the due row of the highest priority that lost the fewest leases.

        Each priority has a query of its own. One query for all would read the index of all rows
        that wait in the queue, however far in the future.
        """
        claimed = Claimed()
        for priority in sorted(priorities, reverse=True):
            claimed.add(self._claim(self._recovered, {"queue": queue, "priority": priority}))
            if claimed:
                break
        return claimed

    @property
    def _has_limits(self) -> bool:
        """Whether any tag has limits."""
        return self._policies is not None and bool(self._policies.known.limited)

    def _claim(self, choice: Choice, parameters: dict[str, Any]) -> Claimed:
        has_limits = self._has_limits
        if not has_limits and choice.claim is not None:
            claim = partial(choice.claim, values=parameters)
            return Claimed(self._tasks(self._db.autocommitted(claim).rows))
        hold_excess = self.hold_excess if has_limits else None
        work = partial(self._lock_and_claim, choice, parameters, hold_excess)
        return self._db.transaction(work)

    def _lock_and_claim(
        self, choice: Choice, parameters: Mapping[str, Any], hold_excess: HoldExcess | None, on: Any
    ) -> Claimed:
        """Lock the rows and claim them, in two statements of one transaction."""
        tasks, seen = self._tasks(choice.lock(on, parameters).rows), NO_WAITLISTS
        if hold_excess is not None:
            starting, seen = hold_excess(on, tasks)
            tasks = [task for task in tasks if task.id in starting]
        self._claim_locked(on, tasks)
        return Claimed(tasks, seen)

    def _claim_locked(self, on: Any, tasks: Sequence[DelayedTask]) -> None:
        """Claim rows that the transaction has locked, and make the same changes to the tasks."""
        if not tasks:
            return
        ids = sorted(task.id for task in tasks)
        answer = self._locked(on, list_of(self._db, ids))
        check_row_count(len(answer.rows) or answer.row_count, len(ids), "rows to claim")
        versions = {row[0]: row[1] for row in answer.rows}
        for task in tasks:
            task.status = MOVES["claim"].target
            task.version = versions.get(task.id, following(task.version))
            task.runs = min(task.runs + 1, MAX_INTEGER)

    def admit(self, on: Any, pairs: Sequence[tuple[int, int]]) -> list[DelayedTask]:
        """Admit those held rows (id and version) that no other transaction has locked."""
        named = self._named(pairs, ANY_LAPSES, MOVES["admit"].source)
        return self._lock_and_claim(*named, None, on)

    def _tasks(self, rows: Iterable[Sequence[Any]]) -> list[DelayedTask]:
        """Return the tasks in the order in which a process runs them."""
        tasks = [task_of(row, self._schema) for row in rows]
        return sorted(tasks, key=lambda task: (-task.priority, task.expected_time, task.id))

    def unclaimed(self, ids: Iterable[int]) -> list[UnclaimedRow]:
        """Return the present state of rows that a claim did not get."""
        t, wanted = self._t, list(ids)
        if not wanted:
            return []
        query = select(t.c.id, t.c.version, t.c.status, t.c.expected_time, t.c.lapses).where(
            t.c.id.in_(wanted)
        )
        rows = self._db.autocommitted(lambda c: c.execute(query).all())
        return [UnclaimedRow(row[0], row[1], Status(row[2]), to_us(row[3]), row[4]) for row in rows]
