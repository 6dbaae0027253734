"""Some of the combinations of clocks that are an hour apart. `./dev clocks` runs all of them."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from chaos.clocks import ABOUT_S, HOUR_S, MOST_CPU, Hours, cpu_s, server, try_out
from tests import running as faketime
from tests.running import Deployment
from tests.services import MissingServiceError
from tests.waiting import SLACK_S

APART = [
    ("postgresql", Hours(HOUR_S, -HOUR_S, 0)),
    ("mariadb", Hours(-HOUR_S, 0, HOUR_S)),
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(faketime.library() is None, reason=faketime.MISSING),
]


@pytest.mark.parametrize(("database", "hours"), APART)
def test_the_database_clock_decides_and_is_not_polled_in_a_tight_loop(
    database: str, hours: Hours, redis_url: str, tmp_path: Path
) -> None:
    try:
        with server(database, hours.database) as url:
            outcome = try_out(tmp_path, url, redis_url, hours)
    except MissingServiceError as error:
        pytest.skip(str(error))
    assert outcome.violations == [], str(outcome.verdict)


@pytest.mark.parametrize("timer", ["eta", "redis"])
def test_setting_the_clock_of_a_worker_that_holds_tasks_makes_no_task_early_or_late(
    timer: str, postgresql_url: str, redis_url: str, tmp_path: Path
) -> None:
    dial = faketime.Dial(tmp_path / "dial")
    settings: dict[str, Any] = {"redis_url": redis_url} if timer == "redis" else {}
    d = Deployment(
        tmp_path,
        postgresql_url,
        redis_url,
        timer=timer,
        **settings,
    )
    try:
        worker = d.worker(**dict[str, Any](dial.environment))
        for ahead_s in (-HOUR_S, HOUR_S, 0):
            tasks = [d.schedule(delay=1 + n / 10) for n in range(20)]
            time.sleep(0.5)  # the worker holds them now
            dial.set(ahead_s)
            what_it_shows = d.schedule("test.time")
            d.wait_for([*tasks, what_it_shows])
            (shown,) = (int(run[1]) for run in d.runs() if run[0] == str(what_it_shows.id))
            assert abs(shown - time.time() - ahead_s) < ABOUT_S, "the worker's clock is set"
            rows = [d.delays.get(task) for task in tasks]
            late = [row.execution_time - row.expected_time for row in rows if row.execution_time]
            assert min(late) >= timedelta(0), f"early, with {ahead_s:+d} s"
            assert max(late) < timedelta(seconds=d.r1_s() + SLACK_S), f"late, with {ahead_s:+d} s"
            assert {(row.attempts, row.lapses) for row in rows} == {(1, 0)}, "each of them once"
            before, began = cpu_s(worker.pid), time.monotonic()
            time.sleep(1)  # the worker is idle meanwhile
            assert (cpu_s(worker.pid) - before) / (time.monotonic() - began) < MOST_CPU, (
                f"hot, with {ahead_s:+d} s"
            )
    finally:
        d.close()
        faketime.forget_the_dead()
