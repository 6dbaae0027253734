"""Test Flask: rows in the request's session, application contexts of processors, and a shop."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result
from flask import Flask, current_app
from flask.cli import FlaskGroup, ScriptInfo
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import select
from sqlalchemy.orm import Session

import delaytasks as e
from delaytasks import DelayedTask, Status
from delaytasks import celery as current
from delaytasks.cli.main import flask_delays
from delaytasks.contrib.flask import FlaskDelays
from delaytasks.model.task import Entry
from delaytasks.runtime import runtime_of
from tests.integration.conftest import run_example
from tests.running import ROOT
from tests.world.recording import counted, make_tables, runner_of

pytest.importorskip("flask_sqlalchemy")


@pytest.fixture(autouse=True)
def own_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the default instance after the test."""
    monkeypatch.setattr(current, "_of_project", None)


class FlaskProject:
    """Provide the objects that a module of a Flask project defines."""

    app: Flask

    def __init__(self, **options: Any) -> None:
        self.db = SQLAlchemy()
        self.delays = FlaskDelays(**options)
        self.armed: list[Entry] = []

    def create_app(self, url: str, name: str = "shop", **settings: Any) -> Flask:
        """Make an app, and the tables of its tasks."""
        self.app = Flask(name)
        self.app.config.update(CELERY={"broker_url": "memory://"}, DELAYTASKS=settings)
        self.app.config["SQLALCHEMY_DATABASE_URI"] = url
        self.db.init_app(self.app)
        self.delays.init_app(self.app)
        make_tables(self.delays)
        return self.app

    def run(self, task: DelayedTask) -> DelayedTask:
        """Run `task` in this process, as a worker does."""
        runner_of(self.delays).run([Entry(task.id, task.version, 0)])
        return self.delays.get(task)

    def count(self) -> int:
        """Return the number of rows that other connections see."""
        return sum(counted(runtime_of(self.delays).store).values())

    def close(self) -> None:
        with self.app.app_context():
            self.db.engine.dispose()
        self.delays.close()


@pytest.fixture
def project(
    sqlite_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FlaskProject]:
    """Yield a project with tables; `project.delays` has an app."""
    with closing(FlaskProject()) as project:
        project.create_app(sqlite_path("shop"))
        monkeypatch.setattr(runtime_of(project.delays).producer_timer, "arm", project.armed.extend)
        yield project


# -- the request's transaction --------------------------------------------------------------------


def test_a_task_is_in_the_requests_transaction_and_armed_after_it(project: FlaskProject) -> None:
    with project.app.test_request_context():
        task = project.delays.schedule_delay("order.close", {"order": 7}, 1)
        assert project.delays.get(task).body == {"order": 7}
        assert [found.id for found in project.delays.find(tag="order.close")] == [task.id]
        assert (project.count(), project.armed) == (0, [])
        project.db.session.commit()
        assert (project.count(), [entry.id for entry in project.armed]) == (1, [task.id])

    @project.app.post("/orders/<outcome>")
    async def create_order(outcome: str) -> dict[str, int]:
        calls = (project.delays.aschedule_delay("order.close", n, 1) for n in range(3))
        await asyncio.gather(*calls)
        if outcome == "kept":
            project.db.session.commit()
        return {"tasks": len(await project.delays.afind())}

    for outcome in ("dropped", "kept"):
        assert project.app.test_client().post(f"/orders/{outcome}").get_json() == {"tasks": 4}
    assert project.count() == len(project.armed) == 4


def test_a_request_that_does_not_commit_is_reported_in_the_log(
    project: FlaskProject, caplog: pytest.LogCaptureFixture
) -> None:
    delays = project.delays
    waits = delays.schedule_delay("order.close", 1, "2d", key="k")

    @project.app.get("/<outcome>")
    def place(outcome: str) -> str:
        if outcome != "reads":
            delays.schedule_delay("order.close", 1, "1d")
            delays.reschedule(tag="order.close", key="k", delay="1d")
        assert delays.get(waits)
        if outcome == "commits":
            project.db.session.commit()
        return outcome

    with caplog.at_level(logging.WARNING, "shop"):
        project.app.test_client().get("/forgets")
        assert "rolls back 2 changes of delayed tasks" in caplog.text
        assert (project.count(), delays.get(waits).version) == (1, 0)
        caplog.clear()
        project.app.test_client().get("/commits")
        project.app.test_client().get("/reads")
    assert "rolls back" not in caplog.text


def test_without_a_context_or_with_a_session_the_requests_session_is_left_alone(
    project: FlaskProject, sqlite_path: Callable[[str], str]
) -> None:
    project.delays.schedule_delay("order.close", 1, 1)
    assert project.count() == len(project.armed) == 1
    with project.app.app_context():
        with Session(project.db.engine) as other, other.begin():
            project.delays.schedule_delay("order.close", 1, 1, session=other)
        project.db.session.rollback()
    assert project.count() == len(project.armed) == 2
    # The same is true of a project whose tasks have a database of their own.
    own, database_url = FlaskProject(), sqlite_path("tasks")
    with closing(own), own.create_app(sqlite_path("shop"), database_url=database_url).app_context():
        own.delays.schedule_delay("order.close", 1, 60)
        own.db.session.rollback()
        assert own.count() == 1


# -- processors -----------------------------------------------------------------------------------


def test_a_processor_has_an_application_context_and_a_transaction_of_its_own(
    project: FlaskProject,
) -> None:
    delays, session, seen = project.delays, project.db.session, list[Any]()
    delays.processor("order.next")(lambda body: None)

    @delays.processor("order.chain")
    def chain(body: str) -> None:
        seen.append((current_app.name, session()))
        session.execute(select(1))
        delays.schedule_delay("order.next", body, 60)
        if body == "fails":
            raise ValueError(body)
        if body == "rolls back":
            session.rollback()
        if body == "commits":
            session.commit()

    def run(body: str) -> tuple[Status, int]:
        done = project.run(delays.schedule_delay("order.chain", body, 0))
        assert body != "forgets" or "ended without db.session.commit()" in str(done.error)
        return done.status, len(delays.find(tag="order.next"))

    assert run("fails") == (Status.FAILED, 0)
    assert run("rolls back") == (Status.DONE, 0)
    assert run("forgets") == (Status.FAILED, 0)
    assert run("commits") == (Status.DONE, 1)
    assert ({name for name, _ in seen}, len({id(used) for _, used in seen})) == ({"shop"}, 4)
    # The sessions were closed, and their connections returned to the pool.
    assert not any(used.in_transaction() for _, used in seen)


# -- app factories --------------------------------------------------------------------------------


def test_the_celery_app_is_the_one_given_or_the_apps_or_made_from_its_configuration() -> None:
    given, extension = (Celery(broker="memory://", set_as_current=False) for _ in range(2))
    app = Flask("shop")
    app.extensions["celery"] = extension
    assert runtime_of(FlaskDelays(app)).celery is extension
    assert runtime_of(FlaskDelays(Flask("shop"), celery_app=given)).celery is given
    app = Flask("shop")
    app.config["CELERY"] = {"broker_url": "memory://made"}
    made = FlaskDelays(app)
    celery = runtime_of(made).celery
    assert (celery.main, celery.conf.broker_url) == ("shop", "memory://made")
    assert app.extensions["celery"] is celery
    assert app.extensions["delaytasks"] is made
    assert "delaytasks.run" in celery.tasks


def test_a_relative_sqlite_path_is_resolved_as_by_flask_sqlalchemy(tmp_path: Path) -> None:
    db, delays = SQLAlchemy(), FlaskDelays()
    app = Flask("shop", instance_path=str(tmp_path))
    app.config |= {"SQLALCHEMY_DATABASE_URI": "sqlite:///shop.sqlite3"}
    app.config["CELERY"] = {"broker_url": "memory://"}
    with pytest.raises(e.ConfigError, match=r"db\.init_app\(app\) before"):
        delays.init_app(app)  # else the tasks would be in another database
    db.init_app(app)
    delays.init_app(app)
    assert runtime_of(delays).store.database.url.database == str(tmp_path / "shop.sqlite3")


def test_wrong_settings_and_a_missing_init_app_are_reported() -> None:
    named: dict[str, Any] = {"did you mean horizon": {"horizon_s": 30}, "is a dict": [("a", 1)]}
    for message, options in named.items():
        app = Flask("shop")
        app.config["DELAYTASKS"] = options
        with pytest.raises(e.ConfigError, match=message):
            FlaskDelays(app)
    with pytest.raises(e.ConfigError, match=r"init_app\(app\)"):
        FlaskDelays().schedule_delay("order.close", 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("fresh_url", ["postgresql"], indirect=True)
def test_the_shops_tests_pass(fresh_url: str) -> None:
    command = "-m pytest -q -p no:cacheprovider -c /dev/null --rootdir . tests.py"
    assert "4 passed" in run_example("flask_shop", fresh_url, *command.split())


def test_two_apps_of_a_process_have_their_own_tasks_and_transactions(
    sqlite_path: Callable[[str], str],
) -> None:
    seen: list[tuple[str, str]] = []
    books, pens = (FlaskProject(default=False) for _ in range(2))
    with closing(books), closing(pens):
        for name, project in (("books", books), ("pens", pens)):
            project.create_app(sqlite_path(name), name, namespace=name)
            assert project.delays.settings.namespace == name
            project.delays.processor("order.close")(lambda at: seen.append((current_app.name, at)))
        # In the context of one app, a task of the other has a transaction of its own.
        with books.app.app_context():
            books.delays.schedule_delay("order.close", 1, 60)
            task = pens.delays.schedule_delay("order.close", "pens", 0)
            books.db.session.rollback()
        assert (books.count(), pens.count()) == (0, 1)
        assert pens.run(task).status is Status.DONE
        assert seen == [("pens", "pens")]


# -- `flask delays …`: the commands of delaytasks on the tasks of a Flask app ---------------------


def flask(app: Flask, *words: str) -> Result:
    group = FlaskGroup(add_version_option=False, create_app=lambda: app)
    group.add_command(flask_delays)
    return CliRunner().invoke(group, ["delays", *words], obj=ScriptInfo(create_app=lambda: app))


def test_a_command_commits_by_itself_and_hints_begin_like_it(
    sqlite_path: Callable[[str], str],
) -> None:
    with closing(FlaskProject()) as project:
        app, delays = project.create_app(sqlite_path("shop"), timer="direct"), project.delays

        def answer(*words: str) -> Any:
            said = flask(app, *words, "--json")
            assert said.exit_code == 0, said.output
            return json.loads(said.stdout)

        @delays.processor("order.print")
        def print_order(body: Any) -> None:
            assert current_app.name == "shop"
            project.db.session.execute(select(1))

        store = runtime_of(delays).store
        store.schema.metadata.drop_all(store.database.tx)
        with (
            app.app_context(),
            pytest.raises(e.SessionUnusableError, match="run: flask --app APP delays db upgrade"),
        ):
            delays.schedule_delay("order.print", {}, 60)
        assert "; run: flask delays db upgrade\n" in flask(app, "list").output
        assert answer("db", "upgrade")["is_current"]
        task = answer("schedule", "order.print", '{"order": 7}', "--delay", "1h")
        answer("cancel", task["id"])
        with app.app_context():
            assert delays.get(task["id"]).status is Status.CANCELLED
        delays.schedule_delay("order.print", {}, 0)
        assert answer("run")["succeeded"] == 1
    plain, up = flask(Flask("plain"), "list"), flask(app, "up")
    assert plain.exit_code == up.exit_code == 2
    assert "the Flask app 'plain' has no delayed tasks; call init_app(app)" in plain.stderr
    assert "delaytasks -A shop.celery up" in up.stderr
    found = '[project.entry-points."flask.commands"]\ndelays = "delaytasks.cli.main:flask_delays"'
    assert found in (ROOT / "pyproject.toml").read_text()
