"""Converts the task table into a partitioned one while it is used. The table becomes the first
partition."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection, func, select, text

from delaytasks.core.errors import ConfigError
from delaytasks.core.ids import first_id
from delaytasks.core.text import count
from delaytasks.partitions.periods import edge_after, periods
from delaytasks.partitions.table import DEFAULT, FIRST, Partitions

#: Objects that would stay with the first partition, or that a partitioned table cannot have.
_OBSTACLES = text(
    """
    WITH t AS (SELECT to_regclass(:name)::oid AS oid)
    SELECT 'view ' || r.ev_class::regclass FROM t JOIN pg_depend d ON d.refobjid = t.oid
        JOIN pg_rewrite r ON r.oid = d.objid AND d.classid = 'pg_rewrite'::regclass
    UNION SELECT 'trigger ' || tgname
        FROM t JOIN pg_trigger ON tgrelid = t.oid WHERE NOT tgisinternal
    UNION SELECT 'foreign key ' || conname || ' of ' || conrelid::regclass
        FROM t JOIN pg_constraint ON t.oid IN (conrelid, confrelid) WHERE contype = 'f'
    UNION SELECT 'unique index ' || indexrelid::regclass
        FROM t JOIN pg_index ON indrelid = t.oid
        WHERE (indisunique OR indisexclusion) AND NOT indisprimary
    UNION SELECT 'policy ' || polname FROM t JOIN pg_policy ON polrelid = t.oid
    UNION SELECT 'publication ' || pubname FROM t JOIN pg_publication_rel ON prrelid = t.oid
        JOIN pg_publication p ON p.oid = prpubid
    UNION SELECT 'inheritance of ' || inhrelid::regclass
        FROM t JOIN pg_inherits ON t.oid IN (inhrelid, inhparent)
    UNION SELECT 'id without identity' FROM t JOIN pg_attribute ON attrelid = t.oid
        WHERE attname = 'id' AND attidentity = ''
    ORDER BY 1
    """
)
_PRIVILEGES = text(
    """
    SELECT format('GRANT %s%s ON %s TO %s%s', privilege_type,
        ' (' || quote_ident(attname) || ')', CAST(:new AS text),
        CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(grantee)) END,
        CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END)
    FROM (
        SELECT NULL AS attname, (aclexplode(relacl)).* FROM pg_class WHERE oid = to_regclass(:old)
        UNION ALL SELECT attname, (aclexplode(attacl)).*
            FROM pg_attribute WHERE attrelid = to_regclass(:old)
    ) AS granted
    """
)
_INDEXES = text(
    "SELECT i.inhparent::regclass::text, i.inhrelid::regclass::text, c.relname "
    "FROM pg_inherits AS i JOIN pg_index AS x ON x.indexrelid = i.inhrelid "
    "JOIN pg_class AS c ON c.oid = i.inhrelid WHERE x.indrelid = to_regclass(:old)"
)


def convert(partitions: Partitions, every: timedelta, ahead: int) -> list[str]:
    """Convert the table, and return the names of all partitions.

    The first partition is the table as it is. It takes new tasks until the second edge from now.
    """
    with partitions.one_at_a_time():
        return _convert(partitions, every, ahead)


def _convert(partitions: Partitions, every: timedelta, ahead: int) -> list[str]:
    partitions.check("r", "is partitioned already; run: delaytasks db partitions maintain")
    now, name = partitions.now(), partitions.tasks.name
    edge = edge_after(edge_after(now, every), every)
    _check_convertible(partitions, first_id(edge))

    def work(connection: Connection) -> list[str]:
        if there := partitions.names(connection):
            return there  # an earlier try made them, whose answer was lost
        _put_under_a_parent(connection, partitions, name + FIRST, first_id(edge))
        made = partitions.make_periods(
            connection, periods(edge, edge_after(now, every) + ahead * every, every)
        )
        partitions.make(connection, name + DEFAULT, "DEFAULT")
        return [name + FIRST, *made, name + DEFAULT]

    with partitions.known(name, f"id < {first_id(edge)}"):
        return partitions.in_turn(work)


def _check_convertible(partitions: Partitions, below: int) -> None:
    table, autocommitted = partitions.tasks, partitions.database.autocommitted
    obstacles = autocommitted(
        lambda c: c.execute(_OBSTACLES, {"name": partitions.quoted()}).scalars().all()
    )
    if obstacles:
        raise ConfigError(
            f"table {table.fullname} cannot be partitioned because of: {', '.join(obstacles)}. "
            "Drop them first, and afterwards make those that partitioned tables can have"
        )
    beyond = autocommitted(
        lambda c: c.execute(select(func.count()).where(table.c.id >= below)).scalar_one()
    )
    if beyond:
        raise ConfigError(
            f"table {table.fullname} has {count(beyond, 'id')} outside of the order of time, "
            f"{below} or above: another program made them, and partitions by time do "
            "not work with them"
        )


def _put_under_a_parent(
    connection: Connection, partitions: Partitions, first: str, below: int
) -> None:
    table, new, old = partitions.tasks, partitions.quoted(), partitions.quoted(first)
    quote, run = connection.dialect.identifier_preparer.quote, connection.exec_driver_sql
    sequence = connection.execute(select(func.pg_get_serial_sequence(new, "id"))).scalar_one()
    counted = run(f"SELECT last_value, is_called FROM {sequence}").one()
    run(f"ALTER TABLE {new} RENAME TO {quote(first)}")
    run(f"ALTER TABLE {old} ALTER id DROP IDENTITY")  # partitions have none of their own
    run(f"CREATE TABLE {new} (LIKE {old} INCLUDING ALL) PARTITION BY RANGE (id)")
    partitions.forget(connection, table.name)
    run(f"ALTER TABLE {new} ALTER id ADD GENERATED BY DEFAULT AS IDENTITY")
    connection.execute(select(func.setval(func.pg_get_serial_sequence(new, "id"), *counted)))
    for grant in connection.execute(_PRIVILEGES, {"old": old, "new": new}).scalars().all():
        run(grant)
    run(f"ALTER TABLE {new} ATTACH PARTITION {old} FOR VALUES FROM (MINVALUE) TO ({below})")
    partitions.forget(connection, first)
    for ours, theirs, name in connection.execute(_INDEXES, {"old": old}).all():
        run(f"ALTER INDEX {theirs} RENAME TO {quote(name + FIRST)}")
        run(f"ALTER INDEX {ours} RENAME TO {quote(name)}")
