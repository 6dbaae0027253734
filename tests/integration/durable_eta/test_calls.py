"""Each way to call a Celery task with a delay writes a row, and the task runs as usual."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group, signature
from celery.exceptions import TaskRevokedError

import tests.durable_tasks  # noqa: F401 - the producers know its tasks
from delaytasks import Status
from delaytasks.runtime import runtime_of
from tests.running import Deployment
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    # Celery's result backend calls a method that redis-py has deprecated.
    pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning"),
]
WAIT_S = 30
SOON_S = 0.2


class Site(Deployment):
    """A Celery app whose tasks are durable, and a worker that runs them."""

    def __init__(
        self, folder: Path, database_url: str, broker_url: str, redis_url: str, **conf: Any
    ) -> None:
        conf = {"imports": ["tests.durable_tasks"], "result_backend": redis_url, **conf}
        super().__init__(folder, database_url, broker_url, conf, durable_eta=True)
        queue = f"celery_{self.settings['namespace']}"
        self.conf["task_default_queue"] = self.app.conf.task_default_queue = queue
        self.worker()

    @property
    def app(self) -> Any:
        return runtime_of(self.delays).celery

    def task(self, name: str) -> Any:
        return self.app.tasks[f"durable.{name}"]

    def rows(self, name: str) -> list[Any]:
        return list(self.delays.find(tag=f"celery:durable.{name}", limit=1000))

    def close(self) -> None:
        with self.app.connection_for_write() as connection:
            for queue in self.app.amqp.queues.values():
                with suppress(*connection.channel_errors):  # it was perhaps never declared
                    queue(connection.default_channel).delete()
        super().close()


@pytest.fixture(scope="module", params=["postgresql-redis", "mysql-rabbitmq"])
def project(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> Iterator[Site]:
    """A project with a running worker, on a database and a broker."""
    database, broker = (request.getfixturevalue(f"{it}_url") for it in request.param.split("-"))
    folder = tmp_path_factory.mktemp("durable")
    with closing(Site(folder, database, broker, redis_url)) as made:
        yield made


def keys(project: Site, name: str) -> set[str]:
    return {row.key for row in project.rows(name)}


def wait_for_done(project: Site, name: str, task_id: str, rows: int = 1) -> None:
    """Wait until all rows of a task are DONE, which is after the broker's confirmation."""

    def are_done() -> bool:
        found = [row for row in project.rows(name) if row.key == task_id]
        return len(found) == rows and all(row.status is Status.DONE for row in found)

    wait_until(are_done, WAIT_S, lambda: f"{rows} rows of {name}: {project.rows(name)}")


def test_apply_async_with_a_countdown_runs_the_task_once_its_row_is_due(project: Site) -> None:
    began = datetime.now(timezone.utc)

    result = project.task("add").apply_async((1, 2), countdown=1)

    (row,) = [row for row in project.rows("add") if row.key == result.id]
    assert row.status is Status.NOT_COMPLETE
    assert result.get(timeout=WAIT_S) == 3
    assert datetime.now(timezone.utc) - began >= timedelta(seconds=1)
    wait_for_done(project, "add", result.id)


def test_an_eta_with_a_time_zone_without_one_and_as_text_is_the_due_time(project: Site) -> None:
    due = (datetime.now(timezone.utc) + timedelta(hours=1)).replace(microsecond=7)
    add = project.task("add")
    other = due.astimezone(timezone(timedelta(hours=3)))
    etas = (due, due.replace(tzinfo=None), due.isoformat(), other)

    results = [add.apply_async((1, 2), eta=eta) for eta in etas]

    found = {row.key: row.due for row in project.rows("add")}
    assert [found[result.id] for result in results] == [due] * len(etas)
    project.app.control.revoke([result.id for result in results])


@pytest.mark.quick
def test_signatures_and_send_task_become_rows(project: Site) -> None:
    add = project.task("add")

    results = [
        add.s(1, 2).apply_async(countdown=SOON_S),
        add.s(1).set(countdown=SOON_S).apply_async((2,)),
        signature("durable.add", (1, 2), app=project.app).apply_async(countdown=SOON_S),
        project.app.send_task("durable.add", (1, 2), countdown=SOON_S),
    ]

    assert {result.id for result in results} <= keys(project, "add")
    assert [result.get(timeout=WAIT_S) for result in results] == [3] * 4


def test_each_retry_is_a_row_with_the_id_of_the_task(project: Site) -> None:
    result = project.task("persist").apply_async((2,), {"countdown": SOON_S}, countdown=SOON_S)

    assert result.get(timeout=WAIT_S) == [2, result.id]
    wait_for_done(project, "persist", result.id, rows=3)


def test_retries_with_other_arguments_and_automatic_ones_are_rows(project: Site) -> None:
    result = project.task("persist").delay(1, countdown=SOON_S, args=(1,), kwargs={})
    automatic = project.task("autoretry").delay()

    assert (result.get(timeout=WAIT_S), automatic.get(timeout=WAIT_S)) == ([1, result.id], 2)
    wait_for_done(project, "persist", result.id, rows=1)
    wait_for_done(project, "autoretry", automatic.id, rows=2)


# -- canvas ------------------------------------------------------------------------------------


def test_a_chain_with_a_countdown_begins_with_a_row_and_later_links_may_too(project: Site) -> None:
    add = project.task("add")

    first = chain(add.s(1, 2), add.s(3), add.s(4)).apply_async(countdown=SOON_S)
    later = chain(add.s(1, 2), add.s(3).set(countdown=SOON_S)).apply_async()

    assert (first.get(timeout=WAIT_S), later.get(timeout=WAIT_S)) == (10, 6)
    assert {first.parent.parent.id, later.id} <= keys(project, "add")


def test_each_header_task_of_a_chord_with_a_countdown_is_a_row(project: Site) -> None:
    add, total = project.task("add"), project.task("total")
    header = group(add.s(number, 1).set(countdown=SOON_S) for number in range(3))

    result = chord(header)(total.s())
    called = chord([add.s(1, 1), add.s(2, 2)], total.s()).apply_async(countdown=SOON_S)

    assert (result.get(timeout=WAIT_S), called.get(timeout=WAIT_S)) == (6, 6)
    assert {each.id for each in result.parent} <= keys(project, "add")


# -- revoke ------------------------------------------------------------------------------------


def test_revoking_a_waiting_task_cancels_its_row_and_stores_its_state(project: Site) -> None:
    result = project.task("add").apply_async((1, 2), countdown=3600)

    result.revoke()

    (row,) = [row for row in project.rows("add") if row.key == result.id]
    assert row.status is Status.CANCELLED
    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT_S)


def test_a_task_that_expires_before_it_is_due_is_revoked_by_the_worker(project: Site) -> None:
    result = project.task("add").apply_async((1, 2), countdown=1, expires=0.5)

    with pytest.raises(TaskRevokedError):
        result.get(timeout=WAIT_S)


# -- result backends and queues of RabbitMQ that work differently ---------------------------------

QUORUM = {"task_default_queue_type": "quorum", "task_default_exchange_type": "topic"}


@pytest.mark.parametrize("conf", [{"result_backend": "rpc://"}, QUORUM], ids=["rpc", "quorum"])
def test_a_durable_task_runs_and_has_a_result(
    tmp_path: Path, postgresql_url: str, rabbitmq_url: str, redis_url: str, conf: dict[str, object]
) -> None:
    with closing(Site(tmp_path, postgresql_url, rabbitmq_url, redis_url, **conf)) as project:
        result = project.task("add").apply_async((1, 2), countdown=0.5)
        assert result.get(timeout=WAIT_S) == 3
        assert [row.key for row in project.rows("add")] == [result.id]
