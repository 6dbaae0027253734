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
from sqlalchemy import func, select
from sqlalchemy.orm import Session

import delaytasks as e
from delaytasks import DelayedTask, Status
from delaytasks import celery as current
from delaytasks.cli.main import flask_delays
from delaytasks.contrib.flask import FlaskDelays
from delaytasks.db.engines import create_sqlite_file
from delaytasks.model.task import Entry
from delaytasks.runtime import runtime_of
from tests.integration.shops import ExampleShop, fresh_database
from tests.running import ROOT
from tests.world.recording import runner_of

pytest.importorskip("flask_sqlalchemy")


@pytest.fixture(autouse=True)
def own_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the default instance after the test."""
    monkeypatch.setattr(current, "_of_project", None)


class FlaskProject:
    """Provide the objects that a module of a Flask project defines."""

    def __init__(self, **options: Any) -> None:
        self.db = SQLAlchemy()
        self.delays = FlaskDelays(**options)
        self.armed: list[Entry] = []

    def create_app(self, url: str | None, name: str = "shop", **settings: Any) -> Flask:
        app = Flask(name)
        app.config.update(CELERY={"broker_url": "memory://"}, DELAYTASKS=settings)
        if url is not None:
            app.config["SQLALCHEMY_DATABASE_URI"] = url
            self.db.init_app(app)
        self.delays.init_app(app)
        return app

    def run(self, task: DelayedTask) -> DelayedTask:
        """Run `task` in this process, as a worker does."""
        runner_of(self.delays).run([Entry(task.id, task.version, 0)])
        return self.delays.get(task)

    def create_tables(self) -> None:
        store = runtime_of(self.delays).store
        create_sqlite_file(store.database.url)
        store.schema.metadata.create_all(store.database.tx)

    def close(self) -> None:
        with app_of(self).app_context():
            self.db.engine.dispose()
        self.delays.close()


@pytest.fixture
def project(
    sqlite_path: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[FlaskProject]:
    """Yield a project with tables; `project.delays` has an app."""
    project = FlaskProject()
    project.create_app(sqlite_path("shop"))
    project.create_tables()
    monkeypatch.setattr(runtime_of(project.delays).producer_timer, "arm", project.armed.extend)
    yield project
    project.close()


def app_of(project: FlaskProject) -> Flask:
    app = project.delays._flask
    assert app is not None
    return app


def count(project: FlaskProject) -> int:
    """Return the number of rows that other connections see."""
    store = runtime_of(project.delays).store
    query = select(func.count()).select_from(store.schema.tasks)
    found: int = store.database.autocommitted(lambda c: c.execute(query).scalar_one())
    return found


# -- the request's transaction --------------------------------------------------------------------


def test_a_task_is_in_the_requests_transaction_and_armed_after_it(project: FlaskProject) -> None:
    with app_of(project).test_request_context():
        task = project.delays.schedule_delay("order.close", {"order": 7}, 1)
        assert project.delays.get(task).body == {"order": 7}
        assert [found.id for found in project.delays.find(tag="order.close")] == [task.id]
        assert count(project) == 0
        assert not project.armed
        project.db.session.commit()
        assert count(project) == 1
        assert [entry.id for entry in project.armed] == [task.id]


def test_an_asynchronous_view_schedules_in_the_requests_transaction(project: FlaskProject) -> None:
    app = app_of(project)

    @app.post("/orders/<outcome>")
    async def create_order(outcome: str) -> dict[str, int]:
        calls = (project.delays.aschedule_delay("order.close", n, 1) for n in range(3))
        await asyncio.gather(*calls)
        if outcome == "kept":
            project.db.session.commit()
        return {"tasks": len(await project.delays.afind())}

    for outcome in ("dropped", "kept"):
        assert app.test_client().post(f"/orders/{outcome}").get_json() == {"tasks": 3}
    assert count(project) == len(project.armed) == 3


@pytest.mark.parametrize("change", ["near", "far", "cancel", "reschedule"])
def test_a_request_that_does_not_commit_is_reported_in_the_log(
    project: FlaskProject, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    app, delays = app_of(project), project.delays
    changes: dict[str, Callable[[], object]] = {
        "near": lambda: delays.schedule_delay("order.close", 1, 1),
        "far": lambda: delays.schedule_delay("order.close", 1, "1d"),
        "cancel": lambda: delays.cancel(tag="order.close", key="k"),
        "reschedule": lambda: delays.reschedule(tag="order.close", key="k", delay="1d"),
    }
    waits = delays.schedule_delay("order.close", 1, "2d", key="k")

    @app.get("/<outcome>")
    def place(outcome: str) -> str:
        if outcome != "reads":
            changes[change]()
        assert delays.get(delays.find(tag="order.close").tasks[0])
        if outcome == "commits":
            project.db.session.commit()
        return outcome

    with caplog.at_level(logging.WARNING, "shop"):
        app.test_client().get("/forgets")
        assert "rolls back 1 change of delayed tasks" in caplog.text
        assert (count(project), delays.get(waits).version) == (1, 0)
        caplog.clear()
        app.test_client().get("/commits")
        app.test_client().get("/reads")
    assert "rolls back" not in caplog.text


def test_without_an_application_context_or_with_a_session_the_requests_session_is_left_alone(
    project: FlaskProject,
) -> None:
    project.delays.schedule_delay("order.close", 1, 1)
    assert count(project) == len(project.armed) == 1
    with app_of(project).app_context():
        with Session(project.db.engine) as other, other.begin():
            project.delays.schedule_delay("order.close", 1, 1, session=other)
        project.db.session.rollback()
    assert count(project) == len(project.armed) == 2


def test_a_database_of_its_own_or_join_session_false_leave_the_requests_session_alone(
    tmp_path: Path, sqlite_path: Callable[[str], str]
) -> None:
    own, joined = FlaskProject(), FlaskProject(join_session=False)
    for project, settings in ((own, {"database_url": sqlite_path("tasks")}), (joined, {})):
        app = project.create_app(sqlite_path("shop"), **settings)
        project.create_tables()
        with app.app_context():
            project.delays.schedule_delay("order.close", 1, 60)
            project.db.session.rollback()
        assert count(project) == 1
        project.close()


# -- processors -----------------------------------------------------------------------------------


def test_a_processor_has_its_own_application_context_and_session(project: FlaskProject) -> None:
    seen: list[Any] = []

    @project.delays.processor("order.look")
    def look(body: Any) -> None:
        seen.append((current_app.name, project.db.session()))
        project.db.session.execute(select(1))

    for _ in range(2):
        task = project.delays.schedule_delay("order.look", 1, 0)
        assert project.run(task).status is Status.DONE
    (name, first), (_, second) = seen
    assert name == "shop"
    assert first is not second
    # The sessions were closed, and their connections returned to the pool.
    assert not any(session.in_transaction() for session in (first, second))


def test_tasks_that_a_processor_schedules_are_in_its_transaction(project: FlaskProject) -> None:
    project.delays.processor("order.next")(lambda body: None)

    @project.delays.processor("order.chain")
    def chain(body: str) -> None:
        project.delays.schedule_delay("order.next", body, 60)
        if body == "fails":
            raise ValueError(body)
        if body == "rolls back":
            project.db.session.rollback()
        if body == "commits":
            project.db.session.commit()

    def run(body: str) -> tuple[DelayedTask, int]:
        done = project.run(project.delays.schedule_delay("order.chain", body, 0))
        return done, len(project.delays.find(tag="order.next"))

    assert run("fails")[1] == 0
    done, following = run("rolls back")
    assert (done.status, following) == (Status.DONE, 0)
    forgetful, following = run("forgets")
    assert (forgetful.status, following) == (Status.FAILED, 0)
    assert "ended without db.session.commit()" in str(forgetful.error)
    done, following = run("commits")
    assert (done.status, following) == (Status.DONE, 1)


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
    assert "delaytasks.run" in app.extensions["celery"].tasks


def test_each_app_of_a_test_suite_has_its_own_settings(sqlite_path: Callable[[str], str]) -> None:
    project = FlaskProject()

    @project.delays.processor("order.close")
    def close(body: Any) -> None: ...

    for name in ("one", "two"):
        app = project.create_app(sqlite_path(name), namespace=name)
        runtime = runtime_of(project.delays)
        assert str(runtime.store.database.url) == sqlite_path(name)
        assert project.delays.settings.namespace == name
        assert runtime.celery is app.extensions["celery"]
        assert runtime.registry.get("order.close") is not None


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


# -- the shop -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["postgresql", "sqlite"])
def test_the_shops_tests_pass(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    command = "-m pytest -q -p no:cacheprovider -c /dev/null --rootdir . tests.py"
    for url in fresh_database(kind, request, tmp_path):
        with closing(ExampleShop("flask_shop", url)) as shop:
            assert "4 passed" in shop.command(*command.split())


# -- Two Flask apps live in one process, each with a database and processors of its own -----------


@pytest.fixture
def shops(sqlite_path: Callable[[str], str]) -> Iterator[dict[str, FlaskProject]]:
    made = {name: FlaskProject(default=False) for name in ("books", "pens")}
    for name, project in made.items():
        project.create_app(sqlite_path(name), name)
        project.create_tables()
    yield made
    for project in made.values():
        project.close()


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
    # In the context of one app, a task of the other has a transaction of its own.
    books, pens = shops.values()
    with app_of(books).app_context():
        books.delays.schedule_delay("order.close", 1, 60)
        pens.delays.schedule_delay("order.close", 2, 60)
        books.db.session.rollback()
    assert (count(books), count(pens)) == (1, 2)


# -- `flask delays …`: the commands of delaytasks on the tasks of a Flask app ---------------------


class FlaskCommands(FlaskProject):
    """A Flask app with its command line, and the tables in an SQLite file."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.app = self.create_app(f"sqlite:///{folder / 'shop.sqlite3'}", timer="direct")

    def __call__(self, *words: str, app: Flask | None = None) -> Result:
        group = FlaskGroup(add_version_option=False, create_app=lambda: app or self.app)
        group.add_command(flask_delays)
        info = ScriptInfo(create_app=lambda: app or self.app)
        return CliRunner().invoke(group, ["delays", *words], obj=info)

    def json(self, *words: str) -> Any:
        said = self(*words, "--json")
        assert said.exit_code == 0, said.output
        return json.loads(said.stdout)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[FlaskCommands]:
    made = FlaskCommands(tmp_path)
    assert made.json("db", "upgrade")["is_current"]
    yield made
    made.close()


def test_a_command_commits_by_itself_and_hints_begin_like_it(commands: FlaskCommands) -> None:
    task = commands.json("schedule", "order.close", '{"order": 7}', "--delay", "1h")
    assert commands.delays.get(task["id"]).body == {"order": 7}
    commands.delays.schedule_delay("order.close", {}, 60)
    assert "More: the same with --cursor " in commands("list", "--limit", "1").stderr
    commands.json("cancel", task["id"])
    with commands.app.app_context():
        assert commands.delays.get(task["id"]).status.name == "CANCELLED"

    @commands.delays.processor("order.print")
    def print_order(body: Any) -> None:
        assert current_app.name == "shop"
        commands.db.session.execute(select(1))

    commands.delays.schedule_delay("order.print", {}, 0)
    assert commands.json("run")["succeeded"] == 1
    found = '[project.entry-points."flask.commands"]\ndelays = "delaytasks.cli.main:flask_delays"'
    assert found in (ROOT / "pyproject.toml").read_text()


def test_missing_tables_are_named_with_the_command_of_flask(commands: FlaskCommands) -> None:
    store = runtime_of(commands.delays).store
    store.schema.metadata.drop_all(store.database.tx)
    remedy = "run: flask --app APP delays db upgrade"
    with pytest.raises(e.StoreError, match=rf"; {remedy}$"):
        commands.delays.schedule_delay("order.close", {}, 60)
    with commands.app.app_context(), pytest.raises(e.SessionUnusableError, match=remedy):
        commands.delays.schedule_delay("order.close", {}, 60)
    assert "; run: flask delays db upgrade\n" in commands("list").output


def test_an_app_without_delayed_tasks_and_up_are_usage_errors(commands: FlaskCommands) -> None:
    plain, up = commands("list", app=Flask("plain")), commands("up")
    assert plain.exit_code == up.exit_code == 2
    assert "the Flask app 'plain' has no delayed tasks; call init_app(app)" in plain.stderr
    assert "delaytasks -A shop.celery up" in up.stderr
