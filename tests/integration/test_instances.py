"""Test the checks of the settings at the start."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from delaytasks import ConfigError, DelayTasks
from delaytasks.broker.arming import SWEEP
from delaytasks.operate.checks import check_settings
from delaytasks.runtime import runtime_of


def test_an_app_has_one_instance() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    DelayTasks(app, "sqlite://")
    with pytest.raises(ConfigError, match="one DelayTasks per Celery app"):
        DelayTasks(app, "sqlite://")


def test_a_schedule_may_only_name_existing_partitions(tmp_path: Any) -> None:
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    delays = DelayTasks(app, f"sqlite:///{tmp_path / 'x.db'}", sweep="5s 2")
    each = {"task": SWEEP, "schedule": 5}
    entries = {"all": each, "first": {**each, "args": (0,)}}
    for sweep_partition in (2, -1, True, "0"):
        app.conf.beat_schedule = {**entries, "mine": {**each, "args": (sweep_partition,)}}
        problem = r"beat_schedule\['mine'\] .* the sweep partitions are 0 to 1"
        with pytest.raises(ConfigError, match=problem):
            check_settings(runtime_of(delays))
    app.conf.beat_schedule = entries
    check_settings(runtime_of(delays))


REDIS_URLS = ["redis://a", "rediss://a", "redis+socket:///x", ["sentinel://a:26379"]]


@pytest.mark.parametrize("url", [*REDIS_URLS, "sentinel://a;sentinel://b"])
@pytest.mark.parametrize("timeout_s", [None, 20])
def test_the_horizon_must_be_below_the_brokers_visibility_timeout(
    tmp_path: Any, url: Any, timeout_s: int | None
) -> None:
    app = Celery(set_as_current=False, broker=url)
    app.conf.broker_transport_options = {"visibility_timeout": timeout_s} if timeout_s else {}
    delays = DelayTasks(app, data_dir=str(tmp_path), horizon=timeout_s or 3600)
    with pytest.raises(ConfigError, match=f"visibility_timeout = {timeout_s or 3600}"):
        check_settings(runtime_of(delays))
    app.conf.broker_transport_options = {"visibility_timeout": "an hour"}
    with pytest.raises(ConfigError, match="'an hour' in broker_transport_options is no number"):
        check_settings(runtime_of(delays))
