"""The tables, and their rows as tasks and as parameters of statements.

The task table is the contract with other programs. `Schema` builds the tables for one prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import (
    DDL,
    BigInteger,
    BindParameter,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Double,
    FromClause,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Select,
    SmallInteger,
    String,
    Table,
    Text,
    Update,
    and_,
    any_,
    bindparam,
    case,
    column,
    event,
    func,
    or_,
    select,
    text,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.elements import conv
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from delaytasks.db.types import (
    LongText,
    UTCDateTime,
    are_counts,
    are_instants,
    db_now,
    for_database,
    is_json_list,
    is_queue_name,
)
from delaytasks.model.body import Cipher
from delaytasks.model.clock import UTC
from delaytasks.model.errors import StoreError
from delaytasks.model.inputs import (
    ACTOR_LENGTH,
    KEY_LENGTH,
    LIMIT_KEY_LENGTH,
    MAX_PRIORITY,
    QUEUE_LENGTH,
    SCHEDULE_NAME_LENGTH,
    TAG_LENGTH,
)
from delaytasks.model.moves import MOST_VERSIONS, MOVES, LateReason, Status
from delaytasks.model.policies import MAX_LIMIT, MAX_PERIOD_S, MIN_PERIOD_S
from delaytasks.model.task import DelayedTask

if TYPE_CHECKING:
    from delaytasks.db.database import Database


# -- The table of the tasks, which other programs may write, too ----------------------------------


#: SQLite generates ids only for INTEGER PRIMARY KEY.
RowId = BigInteger().with_variant(Integer(), "sqlite")

#: The index that claims use, without the prefix of the tables.
HOT_INDEX = "idx_yb_delay_hot"
HOT = f"status IN ({Status.NOT_COMPLETE:d}, {Status.RUNNING:d})"
#: The order of the rows in these indexes: by due time within each queue and priority.
_LEVEL = ("queue", "priority", "expected_time")
ENDED_BADLY = f"status IN ({Status.FAILED:d}, {Status.CANCELLED:d})"
#: MySQL's default collations ignore case and trailing blanks, but 'a' and 'A' are two tags.
MYSQL_OPTIONS: Any = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}
#: PostgreSQL's storage options. Each row is written twice after its insert, and both writes change
#: an indexed column, so they are never HOT updates. Free space in the page keeps new versions next
#: to old ones, and makes renewals of the lease, which change no index, HOT. By default autovacuum
#: waits until a fifth of the table is dead. In a table that keeps finished rows, that is millions
#: of dead entries in the small hot index that every claim reads. With these values it runs after
#: some thousands.
STORAGE = (
    "fillfactor = 85, "
    "autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000, "
    "autovacuum_analyze_scale_factor = 0.02, autovacuum_analyze_threshold = 5000"
)


def task_table(metadata: MetaData, prefix: str) -> Table:
    table = Table(
        prefix + "yb_delay_task_message",
        metadata,
        # Columns up to update_time are a contract: a row with only these is a valid task.
        Column("id", RowId, Identity(always=False), primary_key=True),
        Column("tag", String(TAG_LENGTH), nullable=False),
        Column("message_body", LongText, nullable=False),
        Column(
            "status", SmallInteger, nullable=False, server_default=text(f"{Status.NOT_COMPLETE:d}")
        ),
        Column("error_stack", LongText),
        Column("version", BigInteger, nullable=False, server_default=text("0")),
        Column("ip_address", BigInteger),
        Column("delay_time", BigInteger, nullable=False, server_default=text("0")),
        Column("expected_time", UTCDateTime, nullable=False, server_default=db_now()),
        Column("execution_time", UTCDateTime),
        Column("create_time", UTCDateTime, nullable=False, server_default=db_now()),
        Column("update_time", UTCDateTime, nullable=False, server_default=db_now()),
        Column("queue", String(QUEUE_LENGTH), nullable=False, server_default="default"),
        Column("priority", SmallInteger, nullable=False, server_default=text("0")),
        Column("headers", LongText),
        Column("runs", Integer, nullable=False, server_default=text("0")),
        Column("lapses", Integer, nullable=False, server_default=text("0")),
        Column("lease_until", UTCDateTime),
        Column("worker", String(255)),
        Column("task_key", String(KEY_LENGTH)),
        Column("result", LongText),
        Column("limit_key", String(LIMIT_KEY_LENGTH)),
        # The due time of a deferred task, whose expected_time is its next try; NULL for other
        # tasks.
        Column("due_time", UTCDateTime),
        # Pairs of strings that the caller gave to the task, as JSON.
        Column("meta", LongText),
        # 1 if a running task was asked to stop. The id of the audit row if a bulk operation has
        # cancelled the task. Else NULL.
        Column("cancel_request", BigInteger),
        # What brought the last run, if it began late, and why it did not begin earlier
        # (`BroughtBy` and `LateReason`). A row that was held when it was due, and has not run
        # since, has HELD.
        Column("late_by", SmallInteger),
        *_indexes(prefix),
        **MYSQL_OPTIONS,
    )
    storage = DDL(f"ALTER TABLE %(fullname)s SET ({STORAGE})")  # type: ignore[no-untyped-call]
    event.listen(table, "after_create", storage.execute_if(dialect="postgresql"))
    t = table.c
    # One constraint, since PostgreSQL parses each for each statement.
    is_valid = and_(
        t.status.between(min(Status), max(Status)),
        or_(t.status != Status.RUNNING, and_(t.lease_until.is_not(None), t.worker.is_not(None))),
        are_counts(t.version, t.runs, t.lapses),
        t.priority.between(0, MAX_PRIORITY),
        t.tag != "",
        is_queue_name(t.queue),
        are_instants(
            *(t.expected_time, t.execution_time, t.create_time, t.update_time),
            *(t.lease_until, t.due_time),
        ),
    )
    table.append_constraint(CheckConstraint(is_valid, name=conv(prefix + "ck_yb_delay_task")))
    return table


def hot_index(tasks: Table) -> str:
    """Return the name of this index, with the prefix."""
    return next(str(one.name) for one in tasks.indexes if str(one.name).endswith(HOT_INDEX))


def _indexes(prefix: str) -> Sequence[Index]:
    return (
        Index(conv(prefix + "idx_expectedTime_status"), "expected_time", "status"),
        Index(
            conv(prefix + HOT_INDEX),
            "status",
            *_LEVEL,
            # Complete on other databases: MySQL has no partial indexes, and SQLite does not use one
            # for a status that is a parameter.
            postgresql_where=text(HOT),
        ),
        Index(
            conv(prefix + "idx_yb_delay_held"),
            *_LEVEL,
            "id",  # the indexes of InnoDB and SQLite end with it anyway
            postgresql_where=text(f"status = {Status.HELD:d}"),
        ).ddl_if(dialect="postgresql"),
        Index(
            conv(prefix + "idx_yb_delay_ended_badly"),
            "status",
            *_LEVEL,
            postgresql_where=text(ENDED_BADLY),
        ).ddl_if(dialect="postgresql"),
        Index(
            conv(prefix + "idx_yb_delay_key"),
            "task_key",
            "expected_time",
            postgresql_where=text("task_key IS NOT NULL"),
            sqlite_where=text("task_key IS NOT NULL"),
        ),
    )


#: The longest text of a timing, such as a cron expression.
TIMING_LENGTH = 500
VERSION_LENGTH = 32
#: The length of a hash in hexadecimal digits.
FINGERPRINT_LENGTH = 32
#: The columns that encryption keys encrypt.
BODY, RESULT = "message_body", "result"


class Schema:
    """The tables with this prefix, in this schema of the database."""

    def __init__(
        self, prefix: str = "", schema: str | None = None, cipher: Cipher | None = None
    ) -> None:
        self.metadata = metadata = MetaData(schema=schema or None)
        #: Encrypts bodies and results; None if they are stored as plain text.
        self.cipher = cipher

        def table(
            name: str,
            *items: Column[Any] | Index,
            key: Sequence[str],
            check: Callable[[Any], ColumnElement[bool]] | None = None,
        ) -> Table:
            """Return a table. `key` are the columns of its primary key, and `check` is what its
            rows have to meet."""
            primary_key = PrimaryKeyConstraint(*key, name=conv(f"{prefix}pk_{name}"))
            made = Table(prefix + name, metadata, *items, primary_key, **MYSQL_OPTIONS)
            if check is not None:
                constraint = CheckConstraint(check(made.c), name=conv(f"{prefix}ck_{name}"))
                made.append_constraint(constraint)
            return made

        self.tasks = task_table(metadata, prefix)
        # The keys of live tasks.
        self.keys = table(
            "yb_delay_task_key",
            Column("tag", String(TAG_LENGTH), nullable=False),
            Column("task_key", String(KEY_LENGTH), nullable=False),
            Column("task_id", BigInteger, nullable=False),
            # The key comes first, since it distinguishes rows. If the tag came first, a planner
            # might read all keys of a tag.
            key=["task_key", "tag"],
        )
        # Failed attempts.
        self.attempts = table(
            "yb_delay_attempt",
            Column("task_id", BigInteger, nullable=False, autoincrement=False),
            # The version of the row while it ran. Attempts are counted anew after a manual retry,
            # versions never are.
            Column("version", BigInteger, nullable=False, autoincrement=False),
            Column("attempt", Integer, nullable=False),
            Column("began", UTCDateTime),
            Column("ended", UTCDateTime, nullable=False),
            Column("worker", String(255)),
            Column("error", LongText),
            key=["task_id", "version"],
        )
        # The last sweep of each sweep partition.
        self.sweeps = table(
            "yb_delay_sweep",
            # The number of a sweep partition, and how many there are.
            Column("sweep_partition", Integer, nullable=False, autoincrement=False),
            Column("sweep_partitions", Integer, nullable=False, autoincrement=False),
            Column("swept_at", UTCDateTime, nullable=False),
            Column("armed_until", UTCDateTime, nullable=False),
            # The timer that keeps the tasks up to armed_until.
            Column("timer", String(16), nullable=False, server_default="eta"),
            key=["sweep_partitions", "sweep_partition"],
        )
        # The workers that are alive, and for an hour those that were lost.
        self.workers = table(
            "yb_delay_worker",
            Column("name", String(255), nullable=False),
            Column("seen_at", UTCDateTime, nullable=False),
            Column("started_at", UTCDateTime, nullable=False),
            Column("queues", LongText, nullable=False),
            Column("pool", String(64), nullable=False),
            Column("concurrency", Integer, nullable=False),
            Column("clock_offset_us", BigInteger, nullable=False, server_default=text("0")),
            # The tags for which the worker has processors, as JSON; NULL if they are unknown or too
            # many.
            Column("tags", LongText),
            # Since when the worker cannot reach its broker, or its timer; NULL while it can.
            Column("broker_down_at", UTCDateTime),
            Column("timer_down_at", UTCDateTime),
            # When beat's last message arrived, or since when the worker has waited for the first
            # one; NULL if it reads none.
            Column("beat_at", UTCDateTime),
            # When a sweep found that the worker no longer reports; NULL again after a report.
            Column("lost_at", UTCDateTime),
            # The processes that had a chunk at the last report, and the version of delaytasks.
            Column("busy", Integer),
            Column("version", String(VERSION_LENGTH)),
            check=lambda w: and_(
                is_json_list(w.queues),
                or_(w.tags.is_(None), is_json_list(w.tags)),
                are_counts(w.concurrency),
                or_(w.busy.is_(None), are_counts(w.busy)),
            ),
            key=["name"],
        )
        # The pauses and limits of tags and queues.
        self.policies = table(
            "yb_delay_policy",
            Column("kind", String(8), nullable=False),
            Column("name", String(TAG_LENGTH), nullable=False),
            Column("is_paused", Boolean, nullable=False),
            # When the pause ends by itself; NULL if it lasts until somebody ends it.
            Column("paused_until", UTCDateTime),
            Column("concurrency", Integer),
            Column("concurrency_per_key", Integer),
            Column("rate", Integer),
            Column("rate_period_s", Double),
            Column("version", BigInteger, nullable=False, server_default=text("0")),
            Column("update_time", UTCDateTime, nullable=False, server_default=db_now()),
            Column("updated_by", String(255)),
            # For a rate limit: when the next task may start, and the limit key served last in the
            # waitlist.
            Column("next_start", UTCDateTime),
            Column("turn", String(LIMIT_KEY_LENGTH)),
            # The values that `model/policies.py` accepts. A comparison with NULL refuses nothing.
            check=lambda p: and_(
                p.kind.in_(["tag", "queue"]),
                *(
                    limit.between(1, MAX_LIMIT)
                    for limit in (p.concurrency, p.concurrency_per_key, p.rate)
                ),
                p.rate_period_s.between(MIN_PERIOD_S, MAX_PERIOD_S),
                p.rate.is_(None) == p.rate_period_s.is_(None),
                are_counts(p.version),
            ),
            key=["kind", "name"],
        )
        # The number of requests to cancel running tasks, as the sum of some rows.
        self.cancel_requests = table(
            "yb_delay_cancel_request",
            Column("id", SmallInteger, nullable=False, autoincrement=False),
            Column("number", BigInteger, nullable=False),
            key=["id"],
        )
        # The audit rows of bulk operations.
        self.audit = table(
            "yb_delay_audit",
            Column("id", BigInteger, nullable=False, autoincrement=False),
            Column("action", String(32), nullable=False),
            Column("filter", LongText, nullable=False),
            Column("actor", String(ACTOR_LENGTH), nullable=False),
            Column("state", String(16), nullable=False),
            Column("started_at", UTCDateTime, nullable=False),
            Column("seen_at", UTCDateTime, nullable=False),
            Column("finished_at", UTCDateTime),
            Column("matched", BigInteger, nullable=False),
            Column("changed", BigInteger, nullable=False),
            Column("refused", BigInteger, nullable=False),
            key=["id"],
        )
        # The due tasks of limited tags that wait for capacity.
        self.waitlists = table(
            "yb_delay_waitlist",
            Column("queue", String(QUEUE_LENGTH), nullable=False),
            Column("tag", String(TAG_LENGTH), nullable=False),
            # The limit key; empty for tasks that have none.
            Column("limit_key", String(LIMIT_KEY_LENGTH), nullable=False),
            # The higher the priority, the lower the number.
            Column("place", Integer, nullable=False, autoincrement=False),
            Column("due", UTCDateTime, nullable=False),
            Column("task_id", BigInteger, nullable=False, autoincrement=False),
            # The version of the held row. If the row has another version, this entry is void.
            Column("version", BigInteger, nullable=False, autoincrement=False),
            key=["queue", "tag", "limit_key", "place", "due", "task_id", "version"],
        )
        # The recurring schedules.
        self.recurring = table(
            "yb_delay_recurring",
            Column("name", String(SCHEDULE_NAME_LENGTH), nullable=False),
            # Encrypted bodies are bound to it.
            Column("id", BigInteger, nullable=False, autoincrement=False),
            # What each task of the schedule gets, as in the table of the tasks.
            Column("tag", String(TAG_LENGTH), nullable=False),
            Column("message_body", LongText, nullable=False),
            Column("queue", String(QUEUE_LENGTH), nullable=False),
            Column("priority", SmallInteger, nullable=False),
            Column("headers", LongText),
            Column("meta", LongText),
            Column("limit_key", String(LIMIT_KEY_LENGTH)),
            # When the tasks are due.
            Column("timing", String(TIMING_LENGTH), nullable=False),
            Column("tz", String(64), nullable=False),
            Column("start_at", UTCDateTime),
            Column("jitter_s", Double, nullable=False),
            # What happens to occurrences that were missed, and while the last task has not ended.
            Column("missed", String(16), nullable=False),
            Column("overlap", String(16), nullable=False),
            # Whether the code of a worker declares the schedule.
            Column("is_declared", Boolean, nullable=False),
            Column("is_paused", Boolean, nullable=False),
            # The first occurrence without a task; NULL if the schedule is paused or has ended.
            Column("next_at", UTCDateTime),
            # The last occurrence that has a task, and that task.
            Column("last_at", UTCDateTime),
            Column("last_task_id", BigInteger),
            Column("version", BigInteger, nullable=False, server_default=text("0")),
            Column("create_time", UTCDateTime, nullable=False),
            Column("update_time", UTCDateTime, nullable=False),
            Column("updated_by", String(ACTOR_LENGTH)),
            Index(conv(prefix + "idx_yb_delay_recurring_next"), "next_at"),
            check=lambda r: and_(
                r.tag != "",
                is_queue_name(r.queue),
                r.priority.between(0, MAX_PRIORITY),
                are_counts(r.version),
                r.missed.in_(["latest", "skip", "all"]),
                r.overlap.in_(["allow", "skip"]),
            ),
            key=["name"],
        )
        # What workers have run, by minute and tag; and their failures, by hour, tag and pattern.
        self.statistics = table(
            "yb_delay_statistics",
            Column("start", UTCDateTime, nullable=False),
            Column("tag", String(TAG_LENGTH), nullable=False),
            # Of the error pattern, which is too long for a key; empty for the runs of a tag.
            Column("fingerprint", String(FINGERPRINT_LENGTH), nullable=False),
            # JSON.
            Column("counts", LongText, nullable=False),
            key=["fingerprint", "start", "tag"],
        )


# -- Rows: their columns, and what a move changes -------------------------------------------------

S = TypeVar("S", Select[Any], Update)
#: The largest value of an INTEGER column.
MAX_INTEGER = 2**31 - 1
#: The columns in the order of DelayedTask's fields.
COLUMNS = (
    "id tag message_body expected_time status version queue priority task_key delay_time runs "
    "lapses headers limit_key create_time due_time meta cancel_request "
    "late_by update_time execution_time lease_until worker ip_address error_stack result"
).split()
#: The columns that a worker reads of a row that it claims.
CLAIMED = COLUMNS[: COLUMNS.index("update_time")]


def columns(schema: Schema, names: Sequence[str] = COLUMNS) -> list[Column[Any]]:
    return [schema.tasks.c[name] for name in names]


#: The attribute of a task for each column.
ATTRIBUTES = {
    column: field.name for column, field in zip(COLUMNS, fields(DelayedTask), strict=False)
}


def moved(tasks: Table, move: str, **others: Any) -> dict[str, Any]:
    """Return the new values of rows that this move changes; `others` are the columns of its own."""
    target, held = MOVES[move].target, dict[str, Any]()
    if target is Status.HELD:
        held["late_by"] = int(LateReason.HELD)
    elif move == "release":  # a row that is not due yet was not kept from it
        held["late_by"] = case((tasks.c.expected_time <= db_now(), tasks.c.late_by), else_=None)
    version = next_version(tasks.c.version)
    return {"status": int(target), "version": version, "update_time": db_now(), **held, **others}


def next_version(version: Column[int]) -> ColumnElement[int]:
    return case((version < MOST_VERSIONS, version + 1), else_=0)


def one_more(count: Column[int]) -> ColumnElement[int]:
    """Add one, but not beyond the largest integer: such a row of another program must not fail the
    statement."""
    return case((count < MAX_INTEGER, count + 1), else_=count)


# -- Lists of values and of rows as one parameter -------------------------------------------------


_COLUMN_TYPES = {column.name: column.type for column in task_table(MetaData(), "").columns}
#: The values that are not named as the column of the task table that has their type.
_SAME_TYPE_AS = {
    "old_status": "status",
    "uncounted": "runs",
    "never_ran": "runs",
    "name": "task_key",
    "next_at": "expected_time",
    "last_at": "expected_time",
    "last_task_id": "id",
    # of claims
    "wanted_id": "id",
    "wanted_version": "version",
    "wanted_status": "status",
    "most_lapses": "lapses",
}


def type_of(name: str) -> TypeEngine[Any]:
    """Return the type of a value, which is that of its column in the task table."""
    kind = _COLUMN_TYPES[_SAME_TYPE_AS.get(name, name)]
    # The column limits the length of a text. A list would cut the text, or replace it by NULL.
    return LongText if isinstance(kind, String) else kind


def json_query(database: Database, names: Sequence[str]) -> str:
    """Return a query of these columns, which the database makes from the JSON array parameter
    `rows`."""
    dialect = database.url.get_dialect()()
    types = {name: type_of(name).compile(dialect=dialect) for name in names}
    columns = ", ".join(f"{name} {kind}" for name, kind in types.items())
    paths = ", ".join(f"{name} {kind} PATH '$.{name}'" for name, kind in types.items())
    values = ", ".join(f"json_extract(value, '$.{name}') AS {name}" for name in names)
    return for_database(
        database.backend,
        postgresql=f"SELECT * FROM json_to_recordset(CAST(:rows AS JSON)) AS j ({columns})",
        mysql=f"SELECT * FROM JSON_TABLE(:rows, '$[*]' COLUMNS ({paths})) AS j",
        sqlite=f"SELECT {values} FROM json_each(:rows)",
    )


def json_rows(database: Database, names: Sequence[str]) -> FromClause:
    """Return this query as a table `w`."""
    query = text(json_query(database, names)).bindparams(bindparam("rows", type_=Text()))
    return query.columns(*(column(name, type_of(name)) for name in names)).subquery("w")


def shared_name(name: str) -> str:
    """Return the name of the parameter for a column that has one value in all rows."""
    return f"all_{name}"


def shared_parameter(name: str) -> BindParameter[Any]:
    return bindparam(shared_name(name), type_=type_of(name))


def listed(database: Database, column: Column[Any], name: str) -> ColumnElement[bool]:
    """The condition that a column's value is in the list parameter `name`.

    The index is searched for each value, whatever the statistics contain. PostgreSQL would rather
    scan a table of medium size, unless the list is made while the query runs.
    """
    if not database.can.arrays:
        return column.in_(listing(name))
    made = select(func.unnest(_list_parameter(database, name, column.type)))
    return column == any_(func.array(made.scalar_subquery()))


def _list_parameter(database: Database, name: str, kind: Any) -> BindParameter[Any]:
    """A list parameter: an array if the database has arrays, else written out."""
    if not database.can.arrays:
        return bindparam(name, type_=kind, expanding=True)
    from sqlalchemy.dialects.postgresql import ARRAY  # only where the database is PostgreSQL

    return bindparam(name, type_=ARRAY(kind))


def each_listed(database: Database, id: Column[int]) -> ColumnElement[bool]:
    """The condition that an id is in the list of `claims.list_of`, for prepared statements.

    Without it a table that was never analysed is scanned.
    """
    if not database.can.arrays:
        return id.in_(id_list(database))
    # A kept plan can choose partitions by a range, but not by a list.
    first, last = (bindparam(name, type_=BigInteger) for name in ("first", "last"))
    return and_(id == any_(id_list(database)), id.between(first, last))


def id_list(database: Database) -> BindParameter[Any]:
    """The parameter `ids` of `claims.list_of`."""
    return _list_parameter(database, "ids", BigInteger())


def listing(name: str) -> BindParameter[Any]:
    """A list parameter that is written out, one placeholder for each value."""
    return bindparam(name, expanding=True)


def by_id(statement: S, table: Table) -> S:
    """Let MySQL find the listed rows by their ids.

    It would rather scan a small table or use the index of the status, and wait for each locked row
    there.
    """
    return by_index(statement, table, "PRIMARY")


def by_index(statement: S, table: Table, name: str) -> S:
    """Let MySQL use the index of this name, whatever the table contains."""
    for dialect in ("mysql", "mariadb"):
        statement = statement.with_hint(
            text=f"FORCE INDEX (`{name}`)", selectable=table, dialect_name=dialect
        )
    return statement


class _ValueOfId(FunctionElement[Any]):
    inherit_cache = True


def at_place(database: Database, id: Column[int], name: str) -> ColumnElement[Any]:
    """The value of a row in the list parameter `name`, for rows that `each_listed` finds.

    The list has one value for each id of `claims.list_of`, in the same order.
    """
    return _ValueOfId(id, id_list(database), _list_parameter(database, name, type_of(name)))


@compiles(_ValueOfId, "postgresql")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    id, ids, values = (compiler.process(clause, **kw) for clause in element.clauses)
    # The ids are sorted, so width_bucket finds an id's position by binary search.
    return f"({values})[width_bucket({id}, {ids})]"


@compiles(_ValueOfId, "mysql")
@compiles(_ValueOfId, "mariadb")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    id, *lists = (compiler.process(clause, **kw) for clause in element.clauses)
    # Lists have parentheses, as IN needs them.
    ids, values = (written.removeprefix("(").removesuffix(")") for written in lists)
    return f"ELT(FIELD({id}, {ids}), {values})"


def instant_text(database: Database, instant: datetime | None) -> str | None:
    """Return an instant as text inside a JSON parameter."""
    if instant is None:
        return None
    # isoformat is several times as fast as strftime, and each row of a chunk has one.
    shown = instant.astimezone(UTC).isoformat(" ", "microseconds")
    return shown if database.can.time_zones else shown.removesuffix("+00:00")


# -- Checks that a statement changed exactly the rows that its transaction has locked -------------


def check_row_count(changed: int, locked: int, what: str) -> None:
    """Raise `StoreError`, which rolls the transaction back, if not all locked rows were changed."""
    if changed != locked:
        raise StoreError(
            f"{what}: {changed} of {locked} locked rows were changed, so the transaction is rolled "
            "back; look for a trigger or another program that changes rows which it has not locked"
        )


def move_locked(on: Any, change: Update, ids: Sequence[int], what: str) -> None:
    """Change the rows of these ids, which the transaction has locked."""
    table: Any = change.table
    statement = by_id(change.where(table.c.id.in_(ids)), table)
    check_row_count(on.execute(statement).rowcount, len(ids), what)
