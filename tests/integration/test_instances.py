"""Test the checks of the settings at the start, and messages that are due after long times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from delaytasks import ConfigError, DelayTasks
from delaytasks.broker.arming import SWEEP
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy

pytestmark = pytest.mark.slow


def test_an_app_has_one_instance() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    DelayTasks(app, "sqlite://")
    with pytest.raises(ConfigError, match="one DelayTasks per Celery app"):
        DelayTasks(app, "sqlite://")


@pytest.mark.parametrize("sweep_partition", [2, -1, True, "0"])
def test_a_schedule_may_only_name_existing_partitions(tmp_path: Path, sweep_partition: Any) -> None:
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    each = {"task": SWEEP, "schedule": 5}
    entries = {"all": each, "first": {**each, "args": (0,)}}
    app.conf.beat_schedule = {**entries, "mine": {**each, "args": (sweep_partition,)}}
    delays = DelayTasks(app, f"sqlite:///{tmp_path / 'x.db'}", sweep="5s 2")
    problem = r"beat_schedule\['mine'\] .* the sweep partitions are 0 to 1"
    with pytest.raises(ConfigError, match=problem):
        runtime_of(delays).checks.check_settings()
    app.conf.beat_schedule = entries
    runtime_of(delays).checks.check_settings()


REDIS_URLS = ["redis://a", "rediss://a", "sentinel://a;sentinel://b", ["sentinel://a:26379"]]


@pytest.mark.parametrize(
    ("url", "own", "horizon"),
    [
        *((url, {}, 3600) for url in [*REDIS_URLS, "redis+socket:///x"]),
        ("redis://a", {"visibility_timeout": 20}, 20),
    ],
)
def test_the_horizon_must_be_below_the_brokers_visibility_timeout(
    tmp_path: Path, url: Any, own: dict[str, int], horizon: int
) -> None:
    app = Celery(set_as_current=False, broker=url)
    app.conf.broker_transport_options = own
    delays = DelayTasks(app, data_dir=str(tmp_path), horizon=horizon)
    with pytest.raises(ConfigError, match=f"visibility_timeout = {horizon}"):
        runtime_of(delays).checks.check_settings()


def test_without_a_horizon_a_message_after_the_visibility_timeout_runs_once(deploy: Deploy) -> None:
    """A worker acknowledges a message on receipt, so the broker does not deliver it again."""
    conf = {"broker_transport_options": {"visibility_timeout": 2}}
    d = deploy(conf=conf, horizon=None, sweep=60, _self_sweep_s=120)
    d.worker()
    tasks = [d.schedule(delay=7) for _ in range(20)]
    d.wait_for(tasks)
    assert sorted(int(run[0]) for run in d.runs()) == sorted(task.id for task in tasks)
    assert min(d.lateness_s()) >= 0
