"""The statements in deployment/partitions/, on a table with 20,000 rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine

from delaytasks import Status
from delaytasks.db import migrations
from delaytasks.runtime import runtime_of
from delaytasks.testing import DelaysTester
from tests.services import own_database
from tests.world.recording import delays_on

FOLDER = Path(__file__).parents[2] / "deployment/partitions"
TABLE = "yb_delay_task_message"
TAG = "order.close"
ROWS = 20_000
#: The age of row `n` in seconds: the rows are distributed over a hundred days.
FILL = f"""
INSERT INTO {TABLE} (id, tag, message_body, status, expected_time, update_time)
SELECT ((extract(epoch FROM at) * 1000 - 1577836800000)::bigint << 22) + n,
    '{TAG}', '{{}}', CASE WHEN n % 200 = 0 THEN 0 ELSE 1 END, at, at
FROM generate_series(1, {ROWS}) AS n, LATERAL (SELECT now() - n * interval '432 s' AS at) AS age
"""
#: Make a finished week of two months ago, as if the conversion had been half a year ago.
OLD_WEEK = f"""
DO $$
DECLARE
    week bigint := 7 * 86400000::bigint << 22;
    old bigint := ((extract(epoch FROM now() - interval '60 days') * 1000
        - 1577836800000)::bigint << 22) / week * week;
BEGIN
    ALTER TABLE {TABLE} DETACH PARTITION {TABLE}_p0;
    EXECUTE format('CREATE TABLE {TABLE}_p%s PARTITION OF {TABLE} FOR VALUES FROM (%s) TO (%s)',
        old, old, old + week);
    EXECUTE format('CREATE TABLE {TABLE}_p%s PARTITION OF {TABLE} FOR VALUES FROM (%s) TO (%s)',
        old + week, old + week, old + 2 * week);
    EXECUTE format('INSERT INTO {TABLE} SELECT * FROM {TABLE}_p0 WHERE id >= %s AND id < %s',
        old, old + 2 * week);
    EXECUTE format('INSERT INTO yb_delay_attempt (task_id, version, attempt, ended)
        SELECT id, 1, 1, now() FROM {TABLE} WHERE id < %s', old + 2 * week);
    EXECUTE format('DELETE FROM {TABLE}_p0 WHERE id < %s', old + 2 * week);
    EXECUTE format('ALTER TABLE {TABLE} ATTACH PARTITION {TABLE}_p0 FOR VALUES FROM (%s) TO (%s)',
        old + 2 * week, (extract(epoch FROM now() + interval '7 days') * 1000
        - 1577836800000)::bigint << 22);
END $$
"""


class Server:
    """A private database for the statements."""

    def __init__(self, url: str) -> None:
        self.url = url
        # Without parameters, so that % has no meaning.
        options = {"no_parameters": True}
        self.engine = create_engine(url, isolation_level="AUTOCOMMIT", execution_options=options)

    def run(self, statement: str) -> Any:
        """Return the first value of a query."""
        with self.engine.connect() as connection:
            result = connection.exec_driver_sql(statement)
            return result.scalar() if result.returns_rows else None

    def partitions(self) -> list[str]:
        names = "SELECT array_agg(inhrelid::regclass::text) FROM pg_inherits"
        return sorted(self.run(f"{names} WHERE inhparent = '{TABLE}'::regclass"))

    def count(self, table: str = TABLE) -> int:
        return int(self.run(f"SELECT count(*) FROM {table}"))


@pytest.fixture
def server(postgresql_url: str) -> Iterator[Server]:
    url, drop = own_database(postgresql_url, "_partman")
    server = Server(url)
    if not server.count("pg_available_extensions WHERE name = 'pg_partman'"):
        drop()
        pytest.skip("needs pg_partman, which is not available on this machine's PostgreSQL")
    yield server
    server.engine.dispose()
    drop()


def statements() -> dict[str, str]:
    """Return the statements by their names. `convert.sql` has four, each below its number."""
    parts = re.split(r"(?m)^-- \d\. ", (FOLDER / "convert.sql").read_text())[1:]
    names = ["extension", "prove", "validate", "convert"]
    found = {name: f"-- {part}" for name, part in zip(names, parts, strict=True)}
    others = ("maintain", "move", "drop")
    return found | {name: (FOLDER / f"{name}.sql").read_text() for name in others}


@pytest.mark.slow
def test_the_statements_keep_a_table_in_partitions(server: Server) -> None:
    sql, delays = statements(), delays_on(server.url, timer="direct", tags="any")
    delays.processor(TAG)(lambda body: None)
    migrations.upgrade(runtime_of(delays).store.database)
    server.run(FILL)
    foreign = f"INSERT INTO {TABLE} (tag, message_body, status) VALUES ('{TAG}', '{{}}', 1)"
    server.run(foreign)
    before = delays.schedule_delay(TAG, {"n": 1}, 3600, key="7")
    options = f"SELECT reloptions::text FROM pg_class WHERE oid = '{TABLE}{{}}'::regclass"
    wanted_options = server.run(options.format(""))
    for name in ("extension", "prove", "validate", "convert"):
        server.run(sql[name])
    server.run(foreign)  # the sequence of ids goes on
    assert server.run(f"SELECT array_agg(id) FROM {TABLE} WHERE id < 10") == [1, 2]

    parts = server.partitions()
    assert len(parts) == 7  # the table as it was, five weeks and the default partition
    assert f"{TABLE}_p0" in parts
    assert server.count(f"{TABLE}_p0") == ROWS + 3
    of_parts = {server.run(options.format(part.removeprefix(TABLE))) for part in parts}
    assert of_parts == {wanted_options}
    migrations.upgrade(runtime_of(delays).store.database)
    runtime_of(delays).store.check()

    with DelaysTester(delays) as tester:  # schedule, find and run in all partitions
        late = delays.schedule_delay(TAG, {"n": 2}, "2d", key="8")
        assert delays.get(tag=TAG, key="7").id == before.id
        assert delays.cancel(before.id)
        # One call runs a bounded number of tasks, and the old ones are due.
        tester.fast_forward("3d")
        assert delays.get(late.id).status is Status.DONE
        assert delays.rerun(before.id).status is Status.NOT_COMPLETE
        tester.run_due()
    assert server.count(f"{TABLE} WHERE status = 0") == 0

    server.run(sql["maintain"])
    assert server.partitions() == parts
    # Nothing was scheduled for so long that the week has no partition.
    far = max(int(part.rpartition("_p")[2]) for part in parts if not part.endswith("_default"))
    week = 7 * 86_400_000 << 22
    lost = delays.schedule_delay(TAG, {}, 60, id=far + 2 * week)
    assert server.count(f"{TABLE}_default") == 1
    server.run(sql["move"])
    assert server.count(f"{TABLE}_default") == 0
    assert delays.cancel(lost.id)
    server.run(sql["maintain"])
    assert len(server.partitions()) > len(parts)

    server.run(sql["drop"])
    assert f"{TABLE}_p0" in server.partitions()  # it contains tasks of today
    server.run(OLD_WEEK)
    weeks = [name for name in server.partitions() if re.fullmatch(rf"{TABLE}_p\d{{18}}", name)]
    first, second, *_ = weeks
    attempts, dropped = server.count("yb_delay_attempt"), server.count(second)
    assert dropped > 1000
    server.run(f"UPDATE {first} SET status = 0 WHERE id = (SELECT min(id) FROM {first})")
    server.run(f"UPDATE {second} SET status = 2")
    server.run(sql["drop"])
    assert first in server.partitions(), "a task of that week waits"
    assert second not in server.partitions()
    assert server.count("yb_delay_attempt") == attempts - dropped
    server.run(f"UPDATE {first} SET status = 5 WHERE status = 0")
    server.run(sql["drop"])
    assert first in server.partitions(), "a task of that week is held"
    delays.close()
