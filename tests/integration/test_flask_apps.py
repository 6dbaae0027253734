"""Two Flask apps live in one process, each with a database and processors of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("flask_sqlalchemy")

from flask import current_app

from delaytasks import Status
from delaytasks.runtime import runtime_of
from tests.integration.test_flask import FlaskProject, app_of, count


@pytest.fixture
def shops(sqlite_path: Callable[[str], str]) -> Iterator[dict[str, FlaskProject]]:
    made = {name: FlaskProject(default=False) for name in ("books", "pens")}
    for name, project in made.items():
        project.create_app(sqlite_path(name), name)
        with runtime_of(project.delays).store.database.begin() as connection:
            project.delays.create_tables(connection)
    yield made
    for project in made.values():
        with app_of(project).app_context():
            project.db.engine.dispose()
        project.delays.close()


def test_each_app_schedules_and_runs_its_own_tasks(shops: dict[str, FlaskProject]) -> None:
    seen: list[tuple[str, str, str]] = []

    def close(order: str) -> None:
        database = current_app.extensions["sqlalchemy"].engine.url.database
        seen.append((current_app.name, Path(database).stem, order))

    tasks = {}
    for name, project in shops.items():
        project.delays.processor("order.close")(close)
        with app_of(project).app_context():
            tasks[name] = project.delays.schedule_delay("order.close", name, 0)
            project.db.session.commit()
    for name in ("pens", "books"):
        assert shops[name].run(tasks[name]).status is Status.DONE
    assert seen == [("pens", "pens", "pens"), ("books", "books", "books")]
    for name, project in shops.items():
        assert [(task.id, task.body) for task in project.delays.find()] == [(tasks[name].id, name)]


def test_each_app_has_a_celery_app_that_runs_its_tasks(shops: dict[str, FlaskProject]) -> None:
    celery_apps = [runtime_of(project.delays).celery for project in shops.values()]
    assert celery_apps == [app_of(project).extensions["celery"] for project in shops.values()]
    assert [app.main for app in celery_apps] == ["books", "pens"]
    assert all("delaytasks.run" in app.tasks for app in celery_apps)


def test_in_the_context_of_one_app_a_task_of_the_other_has_a_transaction_of_its_own(
    shops: dict[str, FlaskProject],
) -> None:
    books, pens = shops.values()
    with app_of(books).app_context():
        books.delays.schedule_delay("order.close", 1, 60)
        pens.delays.schedule_delay("order.close", 2, 60)
        books.db.session.rollback()
    assert (count(books), count(pens)) == (0, 1)
