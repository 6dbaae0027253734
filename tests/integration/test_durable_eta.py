"""Each way to call a Celery task with a delay writes a row, and the task runs as usual."""

from __future__ import annotations

from collections import defaultdict
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
        self.app = runtime_of(self.delays).celery
        queue = f"celery_{self.settings['namespace']}"
        self.conf["task_default_queue"] = self.app.conf.task_default_queue = queue
        self.worker()

    def task(self, name: str) -> Any:
        return self.app.tasks[f"durable.{name}"]

    def rows(self, name: str = "add") -> dict[str, list[Any]]:
        """Return the rows of each Celery task of this name, by the id of the task."""
        found = defaultdict[str, list[Any]](list)
        for row in self.delays.find(tag=f"celery:durable.{name}", limit=1000):
            found[str(row.key)].append(row)
        return found

    def wait_for_rows(self, name: str, task_id: str, number: int) -> None:
        """Wait until a task has this many rows, all DONE, which is after the confirmation."""

        def are_done() -> bool:
            return [row.status for row in self.rows(name)[task_id]] == [Status.DONE] * number

        wait_until(are_done, WAIT_S, lambda: f"{number} rows of {name}: {self.rows(name)}")

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


@pytest.mark.quick
def test_each_way_to_call_a_task_later_is_a_row_and_runs_when_it_is_due(project: Site) -> None:
    add, began = project.task("add"), datetime.now(timezone.utc)
    last = add.apply_async((1, 2), countdown=1)
    assert project.rows()[last.id][0].status is Status.NOT_COMPLETE
    results = [
        add.s(1, 2).apply_async(countdown=SOON_S),
        add.s(1).set(countdown=SOON_S).apply_async((2,)),
        signature("durable.add", (1, 2), app=project.app).apply_async(countdown=SOON_S),
        project.app.send_task("durable.add", (1, 2), countdown=SOON_S),
        last,
    ]
    assert {result.id for result in results} <= project.rows().keys()
    assert [result.get(timeout=WAIT_S) for result in results] == [3] * 5
    assert datetime.now(timezone.utc) - began >= timedelta(seconds=1)


def test_an_eta_with_a_time_zone_without_one_and_as_text_is_the_due_time(project: Site) -> None:
    due = (datetime.now(timezone.utc) + timedelta(hours=1)).replace(microsecond=7)
    other = due.astimezone(timezone(timedelta(hours=3)))
    etas = (due, due.replace(tzinfo=None), due.isoformat(), other)
    results = [project.task("add").apply_async((1, 2), eta=eta) for eta in etas]
    assert [project.rows()[result.id][0].due for result in results] == [due] * len(etas)
    project.app.control.revoke([result.id for result in results])


def test_each_retry_is_a_row_with_the_id_of_the_task(project: Site) -> None:
    persist = project.task("persist")
    again = persist.apply_async((2,), {"countdown": SOON_S}, countdown=SOON_S)
    other = persist.delay(1, countdown=SOON_S, args=(1,), kwargs={})  # with other arguments
    automatic = project.task("autoretry").delay()
    for result, value in ((again, [2, again.id]), (other, [1, other.id]), (automatic, 2)):
        assert result.get(timeout=WAIT_S) == value
    project.wait_for_rows("persist", again.id, 3)
    project.wait_for_rows("persist", other.id, 1)
    project.wait_for_rows("autoretry", automatic.id, 2)


def test_the_parts_of_chains_and_chords_with_a_countdown_are_rows(project: Site) -> None:
    add, total = project.task("add"), project.task("total")
    first = chain(add.s(1, 2), add.s(3), add.s(4)).apply_async(countdown=SOON_S)
    later = chain(add.s(1, 2), add.s(3).set(countdown=SOON_S)).apply_async()
    header = group(add.s(number, 1).set(countdown=SOON_S) for number in range(3))
    joined = chord(header)(total.s())
    called = chord([add.s(1, 1), add.s(2, 2)], total.s()).apply_async(countdown=SOON_S)
    values = [result.get(timeout=WAIT_S) for result in (first, later, joined, called)]
    assert values == [10, 6, 6, 6]
    rows = {first.parent.parent.id, later.id, *(each.id for each in joined.parent)}
    assert rows <= project.rows().keys()


def test_a_task_that_is_revoked_or_expires_before_it_is_due_is_revoked(project: Site) -> None:
    revoked = project.task("add").apply_async((1, 2), countdown=3600)
    revoked.revoke()
    assert project.rows()[revoked.id][0].status is Status.CANCELLED
    expired = project.task("add").apply_async((1, 2), countdown=1, expires=0.5)
    for result in (revoked, expired):
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
        assert project.rows().keys() == {result.id}
