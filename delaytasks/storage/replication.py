"""Checks how the database replicates its commits and writes them to disk: can a failover lose
tasks?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from sqlalchemy import Connection, text

from delaytasks.storage.capabilities import for_database
from delaytasks.storage.database import Database

LOST = "a failover loses tasks that were acknowledged"
CRASH = "a crash of the server loses tasks that were acknowledged"


class Replication(NamedTuple):
    """The replication of one database.

    `mode` is "none", "synchronous", "asynchronous", or "stopped" (commits wait for a missing
    standby).
    """

    mode: str
    #: The settings and counts from which the mode was derived.
    facts: str
    #: The consequence and the remedy; None if there is no problem.
    problem: str | None = None


def replication(database: Database) -> Replication | None:
    """Return how this database replicates; None for a database that does not."""
    read = for_database(database.backend, postgresql=_postgresql, mysql=_mysql, sqlite=None)
    return None if read is None else database.autocommitted(read)


#: A role without pg_monitor sees each standby, with NULL for its state. Logical subscribers and
#: pg_basebackup are connected in the same way, but are no targets of a failover.
_STANDBYS = """
SELECT count(*), sum(CASE WHEN sync_state IN ('sync', 'quorum') THEN 1 ELSE 0 END),
    count(sync_state)
FROM pg_stat_replication r
WHERE sync_state IN ('sync', 'quorum') OR COALESCE(state, '') <> 'backup' AND NOT EXISTS (
    SELECT 1 FROM pg_replication_slots s
    WHERE s.active_pid = r.pid
        AND (s.slot_type = 'logical' OR left(s.slot_name, 13) = 'pg_basebackup')
)
"""


def _postgresql(on: Connection) -> Replication:
    names, commit, fsync = (
        str(on.exec_driver_sql(f"SHOW {name}").scalar())
        for name in ("synchronous_standby_names", "synchronous_commit", "fsync")
    )
    standbys, synchronous, seen = on.execute(text(_STANDBYS)).one()
    return of_postgresql(
        names, commit, fsync == "on", standbys, int(synchronous or 0) if seen else None
    )


def of_postgresql(
    names: str, commit: str, fsyncs: bool, standbys: int, synchronous: int | None
) -> Replication:
    """`synchronous` is the number of connected synchronous standbys, None if this role cannot see
    it."""
    facts = (
        f"{standbys} standbys, synchronous_standby_names = '{names}', synchronous_commit = {commit}"
    )
    mode, problem = "none", None
    if names.strip() and commit in ("off", "local"):
        mode = "asynchronous"
        problem = f"{LOST}: set synchronous_commit = on, since no commit waits for a standby now"
    elif names.strip() and (standbys == 0 or synchronous == 0):
        mode = "stopped"
        problem = "no synchronous standby is connected, so each COMMIT waits: bring one back"
    elif names.strip():
        mode = "synchronous"
    elif standbys:
        mode = "asynchronous"
        problem = f"{LOST}: name the standbys in synchronous_standby_names"
    if problem is None and (commit == "off" or not fsyncs):
        setting = "synchronous_commit" if commit == "off" else "fsync"
        problem = f"{CRASH}: set {setting} = on"
    return Replication(mode, facts, problem)


def _mysql(on: Connection) -> Replication:
    found: dict[str, str] = {}
    for what in ("VARIABLES", "STATUS"):
        names = "', '".join(_MYSQL_FACTS[what])
        rows = on.execute(text(f"SHOW GLOBAL {what} WHERE variable_name IN ('{names}')"))
        found.update({str(name).lower(): str(value) for name, value in rows})
    return of_mysql(found)


#: MariaDB and MySQL below 8.0.26 use master in names where newer versions use source.
_MYSQL_FACTS = {
    "VARIABLES": (
        "wsrep_on innodb_flush_log_at_trx_commit rpl_semi_sync_master_enabled "
        "rpl_semi_sync_source_enabled"
    ).split(),
    "STATUS": (
        "Rpl_semi_sync_master_status Rpl_semi_sync_source_status Rpl_semi_sync_master_clients "
        "Rpl_semi_sync_source_clients Slaves_connected wsrep_cluster_size"
    ).split(),
}


def of_mysql(found: Mapping[str, str]) -> Replication:
    """`found` are the variables and status values of `_MYSQL_FACTS`, with names in lower case."""

    def either(name: str) -> str | None:
        return found.get(f"rpl_semi_sync_source_{name}", found.get(f"rpl_semi_sync_master_{name}"))

    def is_on(value: str | None) -> bool:
        return (value or "").upper() in ("ON", "1")

    is_semi_sync, is_active = is_on(either("enabled")), is_on(either("status"))
    clients = either("clients") or "0"
    connected = found.get("slaves_connected")
    facts = f"semi-sync {'on' if is_semi_sync else 'off'}, {clients} semi-sync replicas"
    facts += "" if connected is None else f", {connected} replicas"
    mode, problem = "none", None
    if is_on(found.get("wsrep_on")) and found.get("wsrep_cluster_size", "0") not in ("0", "1"):
        mode, facts = "synchronous", f"Galera, {found['wsrep_cluster_size']} nodes"
    elif is_semi_sync and not is_active:
        mode = "asynchronous"
        problem = (
            f"{LOST}: semi-sync is enabled and has fallen back; "
            "do enough semi-sync replicas answer in time?"
        )
    elif is_semi_sync:
        mode = "synchronous" if clients != "0" else "stopped"
        if clients == "0":
            problem = (
                "no semi-sync replica is connected, "
                "so each COMMIT waits for rpl_semi_sync_*_timeout"
            )
    elif connected not in (None, "0"):
        mode, problem = "asynchronous", f"{LOST}: enable semi-sync replication, or use Galera"
    flushes = found.get("innodb_flush_log_at_trx_commit", "1") == "1"
    if problem is None and mode != "synchronous" and not flushes:
        problem = f"{CRASH}: set innodb_flush_log_at_trx_commit = 1"
    return Replication(mode, facts, problem)
