"""A worker that serves the Celery tasks of `tests/durable_tasks.py`, for each broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import tests.durable_tasks  # noqa: F401 - the producers know its tasks
from delaytasks import DelayTasks
from delaytasks.runtime import runtime_of
from tests.running import Deployment, Process

CONF: dict[str, Any] = {
    "imports": ["tests.durable_tasks"],
    "accept_content": ["json", "pickle", "msgpack", "yaml"],
    "result_accept_content": ["json"],
}


class Shop(NamedTuple):
    """A Celery app whose tasks are durable, and the deployment that runs them."""

    delays: DelayTasks
    deployment: Deployment

    def start_worker(self, *options: str) -> Process:
        # Celery refuses pickle when it runs as root, as it does in containers of CI.
        return self.deployment.worker(*options, concurrency=2, C_FORCE_ROOT="1")

    @property
    def app(self) -> Any:
        return runtime_of(self.delays).celery

    def task(self, name: str) -> Any:
        return self.app.tasks[f"durable.{name}"]

    def rows(self, name: str) -> list[Any]:
        return list(self.delays.find(tag=f"celery:durable.{name}", limit=1000))


def begin(folder: Any, database_url: str, broker_url: str, redis_url: str, **conf: Any) -> Shop:
    conf = {**CONF, "result_backend": redis_url, **conf}
    deployment = Deployment(folder, database_url, broker_url, conf, durable_eta=True)
    # Queues that begin with the namespace are delaytasks' own, and accept nothing but JSON.
    queue = f"celery_{deployment.settings['namespace']}"
    app = runtime_of(deployment.delays).celery
    deployment.conf["task_default_queue"] = app.conf.task_default_queue = queue
    return Shop(deployment.delays, deployment)


def end(project: Shop) -> None:
    """Stop the processes, and delete what the project has in the database and the broker."""
    with project.app.connection_for_write() as connection:
        for queue in project.app.amqp.queues.values():
            try:
                queue(connection.default_channel).delete()
            except connection.channel_errors:
                pass  # it was never declared
    project.deployment.close()


#: The databases and brokers of the central tests.
COMBINATIONS = ["postgresql-redis", "postgresql-rabbitmq", "mysql-rabbitmq", "sqlite-redis"]
in_each_combination = pytest.mark.parametrize("project", COMBINATIONS, indirect=True)


def url_of(database: str, folder: Path, request: pytest.FixtureRequest) -> str:
    """Return the URL of a database, which for SQLite is a file in `folder`."""
    if database == "sqlite":
        return f"sqlite:///{folder / 'test.sqlite3'}"
    url: str = request.getfixturevalue(f"{database}_url")
    return url


@pytest.fixture(scope="module", params=COMBINATIONS[:2])
def project(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> Iterator[Shop]:
    """A project with a running worker, on a database and a broker."""
    folder = tmp_path_factory.mktemp("durable")
    database, broker = request.param.split("-")
    url = url_of(database, folder, request)
    made = begin(folder, url, request.getfixturevalue(f"{broker}_url"), redis_url)
    made.start_worker()
    yield made
    end(made)
