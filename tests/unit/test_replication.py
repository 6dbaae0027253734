"""The settings of a database decide whether acknowledged tasks can be lost."""

from __future__ import annotations

import pytest

from delaytasks.storage.replication import of_mysql, of_postgresql


@pytest.mark.parametrize(
    ("names", "commit", "fsyncs", "standbys", "synchronous", "mode", "problem"),
    [
        ("", "on", True, 0, 0, "none", None),
        ("", "on", True, 2, 0, "asynchronous", "synchronous_standby_names"),
        ("", "on", True, 2, None, "asynchronous", "synchronous_standby_names"),
        ("ANY 1 (a, b)", "on", True, 2, 1, "synchronous", None),
        ("ANY 1 (a, b)", "on", True, 2, None, "synchronous", None),
        ("ANY 1 (a, b)", "local", True, 2, 1, "asynchronous", "synchronous_commit = on"),
        ("nobody", "on", True, 0, 0, "stopped", "COMMIT waits"),
        ("nobody", "on", True, 1, 0, "stopped", "COMMIT waits"),
        ("", "off", True, 0, 0, "none", "crash of the server"),
        ("", "on", False, 0, 0, "none", "fsync = on"),
    ],
)
def test_settings_of_postgresql(
    names: str,
    commit: str,
    fsyncs: bool,
    standbys: int,
    synchronous: int | None,
    mode: str,
    problem: str | None,
) -> None:
    found = of_postgresql(names, commit, fsyncs, standbys, synchronous)
    assert found.mode == mode
    assert (problem is None) == (found.problem is None)
    assert problem is None or problem in (found.problem or "")


def semi_sync(word: str, enabled: str, status: str, clients: str) -> dict[str, str]:
    return {
        f"rpl_semi_sync_{word}_enabled": enabled,
        f"rpl_semi_sync_{word}_status": status,
        f"rpl_semi_sync_{word}_clients": clients,
    }


@pytest.mark.parametrize(
    ("found", "mode", "problem"),
    [
        ({}, "none", None),
        ({"slaves_connected": "0"}, "none", None),
        ({"slaves_connected": "2"}, "asynchronous", "enable semi-sync"),
        ({"innodb_flush_log_at_trx_commit": "2"}, "none", "crash of the server"),
        (
            {"wsrep_on": "ON", "wsrep_cluster_size": "3", "innodb_flush_log_at_trx_commit": "2"},
            "synchronous",
            None,
        ),
        ({"wsrep_on": "OFF", "slaves_connected": "1"}, "asynchronous", "enable semi-sync"),
        (semi_sync("master", "ON", "ON", "1"), "synchronous", None),
        (semi_sync("source", "ON", "ON", "1"), "synchronous", None),
        (semi_sync("master", "ON", "OFF", "1"), "asynchronous", "fallen back"),
        (semi_sync("source", "ON", "OFF", "1"), "asynchronous", "fallen back"),
        (semi_sync("master", "ON", "ON", "0"), "stopped", "COMMIT waits"),
        (semi_sync("source", "OFF", "OFF", "0"), "none", None),
    ],
)
def test_settings_of_mysql_and_mariadb(
    found: dict[str, str], mode: str, problem: str | None
) -> None:
    said = of_mysql(found)
    assert said.mode == mode
    assert (problem is None) == (said.problem is None)
    assert problem is None or problem in (said.problem or "")
