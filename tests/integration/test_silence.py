"""An unreachable database silences all workers.

No worker declares itself or another worker lost for that reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from delaytasks.runtime import runtime_of
from tests.proxy import Proxy, proxy_to
from tests.running import Deployment
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

#: A worker is lost after three silent sweep intervals; these tests sweep every second.
SILENT_S = 3


@pytest.fixture
def proxied(
    request: pytest.FixtureRequest, tmp_path: Path, redis_url: str
) -> Iterator[tuple[Deployment, Proxy]]:
    """Yield a deployment that reaches its database through a proxy."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    database = proxy_to(url)
    d = Deployment(tmp_path, database.url(url), redis_url)
    yield d, database
    database.heal()
    d.close()
    database.close()


def sweeps_go_on(d: Deployment) -> None:
    """Wait until there were several sweeps, and until each worker has reported."""
    w, s = d.store.schema.workers, d.store.schema.sweeps
    now = d.store.tasks.now()

    def done() -> bool:
        with d.store.database.auto.connect() as connection:
            seen = connection.execute(w.select()).all()
            swept = connection.execute(s.select()).all()
        is_seen = seen and all((row.seen_at - now).total_seconds() > SILENT_S + 2 for row in seen)
        return bool(
            is_seen and all((row.swept_at - now).total_seconds() > SILENT_S + 2 for row in swept)
        )

    wait_until(done, 60, lambda: f"sweeps after the outage\n{d.logs()}", every_s=0.2)


@pytest.mark.parametrize("proxied", ["postgresql", "mysql"], indirect=True)
@pytest.mark.parametrize("outage", ["refuse", "swallow"])
def test_no_worker_is_declared_lost_because_the_database_was_away(
    proxied: tuple[Deployment, Proxy], outage: str
) -> None:
    d, database = proxied
    workers = [d.worker(pool="threads"), d.worker(pool="threads")]
    d.wait_for([d.schedule()])
    tasks = [d.schedule(delay=delay) for delay in (1, 2, 3)]
    getattr(database, outage)()
    since = runtime_of(d.delays).clock.now()
    wait_until(
        lambda: (runtime_of(d.delays).clock.now() - since).total_seconds() > 3 * SILENT_S,
        30,
        "the outage",
        every_s=0.1,
    )
    database.heal()
    d.wait_for(tasks, deadline_s=40)
    sweeps_go_on(d)
    logs = "".join(worker.log() for worker in workers)
    assert "worker.lost" not in logs, logs
    assert "queue.unserved" not in logs, logs
    workers[0].kill()
    lost = f"worker.lost worker='{d.node(0)}'"
    wait_until(
        lambda: lost in workers[1].log(),
        40,
        lambda: f"the other one to notice\n{d.logs()}",
        every_s=0.1,
    )
