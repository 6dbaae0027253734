"""Test the command `db partitions`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest

from delaytasks.core.ids import first_id
from delaytasks.partitions import pruning
from delaytasks.partitions.table import Partitions
from delaytasks.wiring import wiring_of
from tests.integration.cli.project import Project

TASKS = "c_yb_delay_task_message"


@pytest.fixture
def place(bare: Project, postgresql_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Return a project with tables on PostgreSQL."""
    monkeypatch.setenv("DELAYTASKS_DATABASE_URL", postgresql_url)
    monkeypatch.setenv("DELAYTASKS_TABLE_PREFIX", "c_")
    monkeypatch.setenv("DELAYTASKS_PURGE_AFTER_S", str(40 * 86400))
    assert bare("db", "upgrade").exit_code == 0
    yield bare
    with wiring_of(bare.delays).store.database.begin() as connection:
        wiring_of(bare.delays).store.schema.metadata.drop_all(connection)
        for (name,) in connection.exec_driver_sql(
            "SELECT tablename FROM pg_tables WHERE tablename ~ '^c_yb_delay'"
        ).all():
            connection.exec_driver_sql(f"DROP TABLE {name}")


def test_a_table_is_converted_listed_and_maintained(place: Project) -> None:
    place.schedule(delay=60)
    made = place.json("db", "partitions", "convert", "--yes")["made"]
    found = place.json("db", "partitions", "list")
    assert (
        [part["name"] for part in found]
        == made
        == [f"{TASKS}_first", *made[1:-1], f"{TASKS}_default"]
    )
    assert [part["live"] for part in found] == [1] + [0] * (len(made) - 1)
    assert found[0]["since"] is None
    assert found[0]["until"] == found[1]["since"]
    assert [part["is_default"] for part in found] == [False] * (len(made) - 1) + [True]
    head, *rows = place("db", "partitions", "list").stdout.splitlines()
    assert head.split() == ["partition", "since", "until", "rows", "MB", "live"]
    assert [row.split()[0] for row in rows] == made

    assert place.json("db", "partitions", "maintain", "--older-than", "30d") == {
        "made": [],
        "pruned": [],
    }
    more = place.json("db", "partitions", "maintain", "--ahead", "6")["made"]
    assert len(more) == 2
    assert made[1] < more[0] < more[1]
    assert place("db", "partitions", "maintain").stdout == "nothing to make\n"


def test_old_partitions_are_dropped_detached_or_kept(
    place: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = wiring_of(place.delays).store.tasks.now()
    with monkeypatch.context() as earlier:
        earlier.setattr(Partitions, "now", lambda _: now - timedelta(days=100))
        _, first, second, *_ = place.json("db", "partitions", "convert", "--ahead", "19", "--yes")[
            "made"
        ]
    with wiring_of(place.delays).store.database.begin() as connection:
        for part, rows in ((first, 1), (second, 2)):
            since = datetime.strptime(part[-8:], "%Y%m%d").replace(tzinfo=timezone.utc)
            for id in range(first_id(since), first_id(since) + rows):
                row = f"({id}, 'ok', '{{}}')"
                connection.exec_driver_sql(
                    f"INSERT INTO {TASKS} (id, tag, message_body) VALUES {row}"
                )
    monkeypatch.setattr(pruning, "MAX_MOVED", 1)
    nothing, *said = place(
        "db", "partitions", "maintain", "--older-than", "30d", "--detach"
    ).stdout.splitlines()
    assert nothing == "nothing to make"
    assert said[:3] == [
        f"detached {TASKS}_first; 0 tasks moved to the default partition",
        f"detached {first}; 1 task moved to the default partition",
        f"kept {second}: too many of its tasks wait, run or ended lately",
    ]
    again = place.json("db", "partitions", "maintain", "--older-than", "30d")
    assert again == {"made": [], "pruned": [{"name": second, "moved": None}]}
    monkeypatch.setattr(pruning, "MAX_MOVED", 2)
    assert (
        f"dropped {second}; 2 tasks"
        in place("db", "partitions", "maintain", "--older-than", "30d").stdout
    )


def test_a_conversion_is_never_done_unasked(place: Project) -> None:
    assert "--yes" in place.error("db", "partitions", "convert", exit_code=2)["error"]
    error = place.error("db", "partitions", "list", exit_code=2)["error"]
    run = f"delaytasks -A {place.name} db partitions convert"
    assert error == f"table {TASKS} is not partitioned; run: {run}"


def test_periods_are_whole_days(place: Project) -> None:
    for every in ("36h", "0d", "1m"):
        error = place.error("db", "partitions", "maintain", "--every", every, exit_code=2)["error"]
        assert error == f"--every is a whole number of days, such as 1d or 7d, and not {every}"


def test_maintain_warns_if_purging_would_delete_the_tasks_earlier(place: Project) -> None:
    place("db", "partitions", "convert", "--yes")
    said = {
        older: place("db", "partitions", "maintain", "--older-than", older).stderr
        for older in ("39d", "40d")
    }
    assert said["39d"] == ""
    assert "delaytasks_purge_after_s is the shorter time" in said["40d"]


@pytest.mark.parametrize("command", [["list"], ["convert", "--yes"], ["maintain"]])
def test_other_databases_have_no_partitions(shop: Project, command: list[str]) -> None:
    error = shop.error("db", "partitions", *command, exit_code=2)
    assert error["type"] == "ConfigError"
    assert error["error"].startswith(
        "partitions need PostgreSQL, and this is sqlite: let the sweep delete old tasks"
    )


def test_the_number_selects_the_database(two: Project) -> None:
    assert (
        "shard 2" in two.error("db", "partitions", "maintain", "--shard", "2", exit_code=2)["error"]
    )
    assert (
        "PostgreSQL"
        in two.error("db", "partitions", "maintain", "--shard", "1", exit_code=2)["error"]
    )
