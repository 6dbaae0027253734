"""Test several instances and deployments in one process, on one broker, and in one database."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from sqlalchemy import text

import delaytasks
from delaytasks import ConfigError, DelayTasks, TaskNotFoundError
from delaytasks.broker.arming import SWEEP
from delaytasks.db import migrations
from delaytasks.db.engines import create_sqlite_file
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.services import RabbitServer
from tests.world.recording import runner_of

pytestmark = pytest.mark.slow

#: RabbitMQ's consumer timeout in these tests; its default is 30 minutes.
CONSUMER_TIMEOUT_S = 2


def instance(tmp_path: Path, name: str, **settings: Any) -> DelayTasks:
    app = Celery(name, broker="memory://", set_as_current=False)
    made = DelayTasks(app, f"sqlite:///{tmp_path / name}.db", **settings)
    create_sqlite_file(runtime_of(made).store.database.url)
    runtime_of(made).store.schema.metadata.create_all(runtime_of(made).store.database.tx)
    return made


def test_two_instances_in_one_process_are_independent(tmp_path: Path) -> None:
    one, two = (instance(tmp_path, name, namespace=name) for name in ("one", "two"))
    ran: list[str] = []
    one.processor("same.tag")(lambda body: ran.append("one"))
    two.processor("same.tag", queue="mine")(lambda body: ran.append("two"))
    task = one.schedule_delay("same.tag", {}, 0)
    other = two.schedule_delay("same.tag", {}, 0)
    assert (task.queue, other.queue) == ("default", "mine")
    with pytest.raises(TaskNotFoundError):
        two.get(task)
    runner_of(one).run_due("default", [0], 10)
    assert ran == ["one"]
    assert two.get(other).status is delaytasks.Status.NOT_COMPLETE
    assert runtime_of(one).publisher.queue("default").name == "one.default"
    assert one.events.counts["task.scheduled"] == two.events.counts["task.scheduled"] == 1


def test_an_app_has_one_instance() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    DelayTasks(app, "sqlite://")
    with pytest.raises(ConfigError, match="one DelayTasks per Celery app"):
        DelayTasks(app, "sqlite://")


def test_deployments_share_a_database_by_schema_or_prefix(postgresql_url: str) -> None:
    schema = "dt_" + secrets.token_hex(4)
    apart = [{"table_prefix": f"{schema}."}, {"table_prefix": "a_"}, {"table_prefix": "b_"}]
    apps = [Celery(broker="memory://", set_as_current=False) for _ in apart]
    made = [DelayTasks(a, postgresql_url, **s) for a, s in zip(apps, apart, strict=True)]
    named = [(d.settings.name_prefix, d.settings.table_schema or None) for d in made]
    places = [(runtime_of(d).store.database, *n) for d, n in zip(made, named, strict=True)]
    try:
        for d, place in zip(made, places, strict=True):
            migrations.upgrade(*place)
            runtime_of(d).store.check()
        tasks = [d.schedule_delay("some.tag", n, 60, key="same") for n, d in enumerate(made)]
        for n, d in enumerate(made):
            assert [task.id for task in d.find(tag="some.tag")] == [tasks[n].id]
            assert d.get(tag="some.tag", key="same").body == n
    finally:
        for d, place in zip(made, places, strict=True):
            migrations.downgrade(*place, "base")
            d.close()
        with places[0][0].begin() as connection:
            connection.execute(text(f"DROP SCHEMA IF EXISTS {schema} CASCADE"))


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


def test_without_a_horizon_a_message_beyond_the_consumer_timeout_runs_once(
    deploy: Deploy, own_rabbitmq: RabbitServer
) -> None:
    """RabbitMQ closes a channel whose consumer does not acknowledge a message in time."""
    own_rabbitmq.hurry(CONSUMER_TIMEOUT_S)
    far_s = 4 * CONSUMER_TIMEOUT_S
    settings: dict[str, Any] = {"horizon": None, "_grace_s": 30, "sweep": 60, "_self_sweep_s": 120}
    kinds = {kind: {"task_default_queue_type": kind} for kind in ("classic", "quorum")}
    place = ("postgresql", own_rabbitmq.url)
    made = [deploy(*place, conf, folder=kind, **settings) for kind, conf in kinds.items()]
    workers = [d.worker() for d in made]
    held = [(d, [d.schedule(delay=far_s) for _ in range(20)]) for d in made]
    running = [(d, d.schedule("test.sleep", body={"seconds": far_s})) for d in made]
    for d, task in running:
        d.wait_for([task])
        assert [run[1] for run in d.runs() if run[0] == str(task.id)] == ["began", "ended"]
    for d, tasks in held:
        d.wait_for([*tasks, d.schedule(delay=0.2)])
        noted = [run for run in d.runs() if run[1].isdigit()]
        assert len({run[0] for run in noted}) == len(noted) == 21
        assert max(d.lateness_s()) < 2, "by its message: no sweep came"
    assert not any("onnection to broker lost" in worker.log() for worker in workers)
    assert "delivery acknowledgement" not in own_rabbitmq.log(), "no channel was closed"
