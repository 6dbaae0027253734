"""Test several instances and deployments in one process, on one broker, and in one database."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, _state
from sqlalchemy import text

import delaytasks
from delaytasks import ConfigError, DelayTasks, TaskNotFoundError
from delaytasks.current import set_project_delays
from delaytasks.runtime import runtime_of
from delaytasks.storage import migrations
from delaytasks.timers.arming import SWEEP
from tests.recording import runner_of
from tests.running import Deployment
from tests.services import RabbitServer

pytestmark = pytest.mark.slow

#: RabbitMQ's consumer timeout in these tests; its default is 30 minutes.
CONSUMER_TIMEOUT_S = 2


def instance(tmp_path: Path, name: str, **settings: Any) -> DelayTasks:
    made = DelayTasks(
        Celery(name, broker="memory://", set_as_current=False),
        f"sqlite:///{tmp_path / name}.db",
        **settings,
    )
    runtime_of(made).store.schema.metadata.create_all(runtime_of(made).store.database.tx)
    return made


def test_two_instances_in_one_process_are_independent(tmp_path: Path) -> None:
    one, two = (
        instance(tmp_path, "one", namespace="one"),
        instance(tmp_path, "two", namespace="two"),
    )
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


def test_the_functions_of_the_package_are_those_of_the_current_instance(tmp_path: Path) -> None:
    mine, other = instance(tmp_path, "mine"), instance(tmp_path, "other")
    set_project_delays(mine)
    try:

        @delaytasks.processor("default.tag")
        def process(body: Any) -> None: ...

        task = delaytasks.schedule_delay("default.tag", {"a": 1}, 60, key="k")
        assert mine.get(task).body == {"a": 1}
        with pytest.raises(ConfigError, match=r"default\.tag.*process"):
            delaytasks.processor("default.tag")(lambda body: None)
    finally:
        set_project_delays(None)
    before = _state._tls.current_app
    for delays in (mine, other):
        runtime_of(delays).celery.set_current()
        assert delaytasks.current_delays() is delays
    _state._set_current_app(before)


@pytest.fixture
def schema_url(postgresql_url: str) -> tuple[str, str]:
    return postgresql_url, "dt_" + secrets.token_hex(4)


def test_deployments_share_a_database_by_schema_or_prefix(schema_url: tuple[str, str]) -> None:
    url, schema = schema_url
    apart = [{"table_prefix": f"{schema}."}, {"table_prefix": "a_"}, {"table_prefix": "b_"}]
    made = [
        DelayTasks(Celery(str(n), broker="memory://", set_as_current=False), url, **s)
        for n, s in enumerate(apart)
    ]
    try:
        for d in made:
            migrations.upgrade(
                runtime_of(d).store.database,
                d.settings.name_prefix,
                d.settings.table_schema or None,
            )
            runtime_of(d).store.check()
        tasks = [d.schedule_delay("some.tag", n, 60, key="same") for n, d in enumerate(made)]
        for n, d in enumerate(made):
            assert [task.id for task in d.find(tag="some.tag")] == [tasks[n].id]
            assert d.get(tag="some.tag", key="same").body == n
    finally:
        for d in made:
            migrations.downgrade(
                runtime_of(d).store.database,
                d.settings.name_prefix,
                d.settings.table_schema or None,
                "base",
            )
            d.close()
        with runtime_of(made[0]).store.database.begin() as connection:
            connection.execute(text(f"DROP SCHEMA IF EXISTS {schema} CASCADE"))


def test_the_horizon_must_be_below_the_brokers_visibility_timeout(tmp_path: Path) -> None:
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.broker_transport_options = {"visibility_timeout": 20}
    with pytest.raises(ConfigError, match="visibility_timeout = 20"):
        runtime_of(
            DelayTasks(app, f"sqlite:///{tmp_path / 'x.db'}", horizon=20)
        ).checks.check_ready()


@pytest.mark.parametrize("sweep_partition", [2, -1, True, "0"])
def test_a_schedule_of_the_app_may_only_name_existing_sweep_partitions(
    tmp_path: Path, sweep_partition: Any
) -> None:
    app = Celery("shop", broker="redis://127.0.0.1:1/0", set_as_current=False)
    entries = {
        "all": {"task": SWEEP, "schedule": 5},
        "first": {"task": SWEEP, "schedule": 5, "args": (0,)},
    }
    app.conf.beat_schedule = {
        **entries,
        "mine": {"task": SWEEP, "schedule": 5, "args": (sweep_partition,)},
    }
    delays = DelayTasks(app, f"sqlite:///{tmp_path / 'x.db'}", sweep=(5, 2))
    with pytest.raises(
        ConfigError, match=r"beat_schedule\['mine'\] .* the sweep partitions are 0 to 1"
    ):
        runtime_of(delays).checks.check_settings()
    app.conf.beat_schedule = entries
    runtime_of(delays).checks.check_settings()


@pytest.mark.parametrize(
    "url",
    [
        "redis://a",
        "rediss://a",
        "sentinel://a;sentinel://b",
        ["sentinel://a:26379"],
        "redis+socket:///x",
    ],
)
def test_the_horizon_must_be_below_the_visibility_timeout_that_kombu_has_for_every_redis(
    tmp_path: Path, url: Any
) -> None:
    app = Celery(set_as_current=False, broker=url)
    delays = DelayTasks(app, data_dir=str(tmp_path), horizon=3600)
    with pytest.raises(ConfigError, match="visibility_timeout = 3600"):
        runtime_of(delays).checks.check_settings()


def test_without_a_horizon_a_message_beyond_the_visibility_timeout_runs_once(
    tmp_path: Path, postgresql_url: str, redis_url: str
) -> None:
    """A worker acknowledges a message on receipt, so the broker does not deliver it again."""
    conf = {"broker_transport_options": {"visibility_timeout": 2}}
    d = Deployment(
        tmp_path, postgresql_url, redis_url, conf, horizon=None, sweep=60, _self_sweep_s=120
    )
    try:
        d.worker()
        tasks = [d.schedule(delay=7) for _ in range(20)]
        d.wait_for(tasks)
        assert sorted(int(run[0]) for run in d.runs()) == sorted(task.id for task in tasks)
        assert min(int(run[1]) for run in d.runs()) >= 0
    finally:
        d.close()


def test_without_a_horizon_a_message_beyond_the_consumer_timeout_runs_once(
    tmp_path: Path, postgresql_url: str, own_rabbitmq: RabbitServer
) -> None:
    """RabbitMQ closes a channel whose consumer does not acknowledge a message in time."""
    own_rabbitmq.hurry(CONSUMER_TIMEOUT_S)
    far_s, made = 4 * CONSUMER_TIMEOUT_S, []
    try:
        for queue_type in ("classic", "quorum"):
            (folder := tmp_path / queue_type).mkdir()
            conf = {"task_default_queue_type": queue_type}
            settings = {"horizon": None, "_grace_s": 30, "sweep": 60, "_self_sweep_s": 120}
            made.append(Deployment(folder, postgresql_url, own_rabbitmq.url, conf, **settings))
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
            assert max(int(run[1]) for run in noted) < 2_000_000, "by its message: no sweep came"
        assert not any("onnection to broker lost" in worker.log() for worker in workers)
        assert "delivery acknowledgement" not in own_rabbitmq.log(), "no channel was closed"
    finally:
        for d in made:
            d.close()
