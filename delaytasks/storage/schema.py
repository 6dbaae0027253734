"""The tables. The migrations build exactly these, and a test compares them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    text,
)
from sqlalchemy.sql.elements import conv

from delaytasks.core.inputs import (
    ACTOR_LENGTH,
    CONCURRENCY_KEY_LENGTH,
    KEY_LENGTH,
    QUEUE_LENGTH,
    TAG_LENGTH,
)
from delaytasks.core.states import Status
from delaytasks.storage.types import LongText, UTCDateTime, db_now

if TYPE_CHECKING:
    from delaytasks.encryption.cipher import Cipher

#: The columns that encryption keys encrypt.
BODY, RESULT = "message_body", "result"

#: SQLite generates ids only for INTEGER PRIMARY KEY.
RowId = BigInteger().with_variant(Integer(), "sqlite")

HOT = f"status IN ({Status.NOT_COMPLETE:d}, {Status.RUNNING:d})"
ENDED_BADLY = f"status IN ({Status.FAILED:d}, {Status.CANCELLED:d})"
#: MySQL's default collations ignore case and trailing blanks, but 'a' and 'A' are two tags.
_MYSQL: Any = {
    "mysql_charset": "utf8mb4",
    "mysql_collate": "utf8mb4_bin",
    "mariadb_charset": "utf8mb4",
    "mariadb_collate": "utf8mb4_bin",
}
#: PostgreSQL's storage options. The migration that sets them gives the reasons.
STORAGE = {
    "fillfactor": "85",
    "autovacuum_vacuum_scale_factor": "0.01",
    "autovacuum_vacuum_threshold": "5000",
    "autovacuum_analyze_scale_factor": "0.02",
    "autovacuum_analyze_threshold": "5000",
}


@dataclass(frozen=True)
class Schema:
    metadata: MetaData
    tasks: Table
    keys: Table
    attempts: Table
    sweeps: Table
    workers: Table
    shards: Table
    policies: Table
    policy_changes: Table
    audit: Table
    lines: Table
    #: The number of the shard that has these tables.
    shard: int
    #: Encrypts bodies and results; None if they are stored as plain text.
    cipher: Cipher | None = None


def build_schema(
    prefix: str = "", schema: str | None = None, shard: int = 0, cipher: Cipher | None = None
) -> Schema:
    metadata = MetaData(schema=schema or None)
    tasks = Table(
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
        Column("attempts", Integer, nullable=False, server_default=text("0")),
        Column("lapses", Integer, nullable=False, server_default=text("0")),
        Column("lease_until", UTCDateTime),
        Column("worker", String(255)),
        Column("task_key", String(KEY_LENGTH)),
        Column("result", LongText),
        Column("concurrency_key", String(CONCURRENCY_KEY_LENGTH)),
        # The due time of a deferred task, whose expected_time is its next try; NULL for other
        # tasks.
        Column("due_time", UTCDateTime),
        Index(conv(prefix + "idx_expectedTime_status"), "expected_time", "status"),
        Index(
            conv(prefix + "idx_yb_delay_hot"),
            "status",
            "queue",
            "priority",
            "expected_time",
            # Complete on other databases: MySQL has no partial indexes, and SQLite does not use one
            # for a status that is a parameter.
            postgresql_where=text(HOT),
        ),
        Index(
            conv(prefix + "idx_yb_delay_held"),
            "queue",
            "priority",
            "expected_time",
            postgresql_where=text(f"status = {Status.HELD:d}"),
        ).ddl_if(dialect="postgresql"),
        Index(
            conv(prefix + "idx_yb_delay_ended_badly"),
            "status",
            "queue",
            "priority",
            "expected_time",
            postgresql_where=text(ENDED_BADLY),
        ).ddl_if(dialect="postgresql"),
        Index(
            conv(prefix + "idx_yb_delay_key"),
            "task_key",
            "expected_time",
            postgresql_where=text("task_key IS NOT NULL"),
            sqlite_where=text("task_key IS NOT NULL"),
        ),
        **_MYSQL,
    )
    keys = Table(
        prefix + "yb_delay_task_key",
        metadata,
        Column("tag", String(TAG_LENGTH), nullable=False),
        Column("task_key", String(KEY_LENGTH), nullable=False),
        Column("task_id", BigInteger, nullable=False),
        # The key comes first, since it distinguishes rows. If the tag came first, a planner might
        # read all keys of a tag.
        PrimaryKeyConstraint("task_key", "tag", name=conv(prefix + "pk_yb_delay_task_key")),
        **_MYSQL,
    )
    attempts = Table(
        prefix + "yb_delay_attempt",
        metadata,
        Column("task_id", BigInteger, nullable=False, autoincrement=False),
        # The version of the row while it ran. Attempts are counted anew after a manual retry,
        # versions never are.
        Column("version", BigInteger, nullable=False, autoincrement=False),
        Column("attempt", Integer, nullable=False),
        Column("began", UTCDateTime),
        Column("ended", UTCDateTime, nullable=False),
        Column("worker", String(255)),
        Column("error", LongText),
        PrimaryKeyConstraint("task_id", "version", name=conv(prefix + "pk_yb_delay_attempt")),
        **_MYSQL,
    )
    sweeps = Table(
        prefix + "yb_delay_sweep",
        metadata,
        # The number of a sweep partition, and how many there are.
        Column("house", Integer, key="sweep_partition", nullable=False, autoincrement=False),
        Column("houses", Integer, key="sweep_partitions", nullable=False, autoincrement=False),
        Column("swept_at", UTCDateTime, nullable=False),
        Column("armed_until", UTCDateTime, nullable=False),
        # The timer that holds the tasks up to armed_until.
        Column("timer", String(16), nullable=False, server_default="eta"),
        PrimaryKeyConstraint(
            "sweep_partitions", "sweep_partition", name=conv(prefix + "pk_yb_delay_sweep")
        ),
        **_MYSQL,
    )
    workers = Table(
        prefix + "yb_delay_worker",
        metadata,
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
        PrimaryKeyConstraint("name", name=conv(prefix + "pk_yb_delay_worker")),
        **_MYSQL,
    )
    shards = Table(  # one row
        prefix + "yb_delay_shard",
        metadata,
        Column("number", Integer, nullable=False, autoincrement=False),
        PrimaryKeyConstraint("number", name=conv(prefix + "pk_yb_delay_shard")),
        **_MYSQL,
    )
    policies = Table(
        prefix + "yb_delay_policy",
        metadata,
        Column("kind", String(8), nullable=False),
        Column("name", String(TAG_LENGTH), nullable=False),
        Column("is_paused", Boolean, nullable=False),
        Column("concurrency", Integer),
        Column("key_concurrency", Integer),
        Column("rate", Integer),
        Column("rate_period_s", Double),
        Column("version", BigInteger, nullable=False, server_default=text("0")),
        # The version to which all rows have been held or released.
        Column("applied_version", BigInteger),
        Column("update_time", UTCDateTime, nullable=False, server_default=db_now()),
        Column("updated_by", String(255)),
        # For a rate limit: when the next task may start, and the concurrency key served last in the
        # waitlist.
        Column("next_start", UTCDateTime),
        Column("turn", String(CONCURRENCY_KEY_LENGTH)),
        # The number of the transaction that last changed the policy, counted in the next table.
        Column("change_number", BigInteger, nullable=False, server_default=text("0")),
        PrimaryKeyConstraint("kind", "name", name=conv(prefix + "pk_yb_delay_policy")),
        Index(conv(prefix + "idx_yb_delay_policy_change"), "change_number"),
        **_MYSQL,
    )
    policy_changes = Table(  # one row
        prefix + "yb_delay_policy_change",
        metadata,
        Column("id", SmallInteger, nullable=False, autoincrement=False),
        Column("number", BigInteger, nullable=False),
        PrimaryKeyConstraint("id", name=conv(prefix + "pk_yb_delay_policy_change")),
        **_MYSQL,
    )
    audit = Table(
        prefix + "yb_delay_audit",
        metadata,
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
        PrimaryKeyConstraint("id", name=conv(prefix + "pk_yb_delay_audit")),
        **_MYSQL,
    )
    lines = Table(
        prefix + "yb_delay_waitlist",
        metadata,
        Column("queue", String(QUEUE_LENGTH), nullable=False),
        Column("tag", String(TAG_LENGTH), nullable=False),
        # The concurrency key; empty for tasks that have none.
        Column("lane", String(CONCURRENCY_KEY_LENGTH), nullable=False),
        # The higher the priority, the lower the number.
        Column("place", Integer, nullable=False, autoincrement=False),
        Column("due", UTCDateTime, nullable=False),
        Column("task_id", BigInteger, nullable=False, autoincrement=False),
        # The version of the held row. If the row has another version, this entry is void.
        Column("version", BigInteger, nullable=False, autoincrement=False),
        PrimaryKeyConstraint(
            "queue",
            "tag",
            "lane",
            "place",
            "due",
            "task_id",
            "version",
            name=conv(prefix + "pk_yb_delay_waitlist"),
        ),
        **_MYSQL,
    )
    return Schema(
        metadata=metadata,
        tasks=tasks,
        keys=keys,
        attempts=attempts,
        sweeps=sweeps,
        workers=workers,
        shards=shards,
        policies=policies,
        policy_changes=policy_changes,
        audit=audit,
        lines=lines,
        shard=shard,
        cipher=cipher,
    )
