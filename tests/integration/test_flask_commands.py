"""`flask delays …`: the commands of delaytasks on the tasks of a Flask app."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("flask_sqlalchemy")

from flask import Flask
from flask.cli import FlaskGroup, ScriptInfo
from flask_sqlalchemy import SQLAlchemy

from delaytasks import api
from delaytasks.cli.main import flask_delays
from delaytasks.contrib.flask import FlaskDelays
from delaytasks.core.errors import SessionUnusableError, StoreError
from delaytasks.runtime import runtime_of
from tests.running import ROOT

db = SQLAlchemy()


class FlaskCommands:
    """A Flask app with its command line, and the tables in an SQLite file."""

    def __init__(self, folder: Path) -> None:
        self.delays = FlaskDelays()
        self.app = Flask("shop")
        self.app.config.update(
            CELERY={"broker_url": "memory://"},
            DELAYTASKS={"timer": "direct"},
            SQLALCHEMY_DATABASE_URI=f"sqlite:///{folder / 'shop.sqlite3'}",
        )
        db.init_app(self.app)
        self.delays.init_app(self.app)

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
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FlaskCommands]:
    monkeypatch.setattr(api, "_default", None)
    made = FlaskCommands(tmp_path)
    assert made.json("db", "upgrade")["is_current"]
    yield made
    with made.app.app_context():
        db.engine.dispose()
    made.delays.close()


def test_flask_finds_the_commands_by_an_entry_point() -> None:
    found = '[project.entry-points."flask.commands"]\ndelays = "delaytasks.cli.main:flask_delays"'
    assert found in (ROOT / "pyproject.toml").read_text()


def test_a_command_commits_although_calls_in_an_application_context_do_not(
    commands: FlaskCommands,
) -> None:
    task = commands.json("schedule", "order.close", '{"order": 7}', "--delay", "1h")
    assert commands.delays.get(task["id"]).body == {"order": 7}
    commands.json("cancel", task["id"])
    with commands.app.app_context():
        assert commands.delays.get(task["id"]).status.name == "CANCELLED"


def test_a_command_runs_processors_in_an_application_context(commands: FlaskCommands) -> None:
    @commands.delays.processor("order.close")
    def close(body: Any) -> None:
        from flask import current_app

        assert current_app.name == "shop"
        db.session.execute(db.text("SELECT 1"))

    commands.delays.schedule_delay("order.close", {}, 0)
    assert commands.json("drain")["succeeded"] == 1


def test_hints_begin_like_the_command_itself(commands: FlaskCommands) -> None:
    for number in range(3):
        commands.delays.schedule_delay("order.close", number, 60)
    assert "More: flask delays list --limit 1 --cursor " in commands("list", "--limit", "1").stderr


def test_missing_tables_are_named_with_the_command_of_flask(commands: FlaskCommands) -> None:
    store = runtime_of(commands.delays).store
    with store.database.begin() as connection:
        store.schema.metadata.drop_all(connection)
    with pytest.raises(StoreError, match=r"; run: flask --app APP delays db upgrade$"):
        commands.delays.schedule_delay("order.close", {}, 60)
    with (
        commands.app.app_context(),
        pytest.raises(SessionUnusableError, match="tables, run: flask --app APP delays db upgrade"),
    ):
        commands.delays.schedule_delay("order.close", {}, 60)
    for words in (["list"], ["health"]):
        said = commands(*words)
        assert "; run: flask delays db upgrade\n" in said.output, said.output


def test_an_app_without_delayed_tasks_and_up_are_usage_errors(commands: FlaskCommands) -> None:
    plain = commands("list", app=Flask("plain"))
    assert plain.exit_code == 2
    assert "the Flask app 'plain' has no delayed tasks; call init_app(app)" in plain.stderr
    up = commands("up")
    assert up.exit_code == 2
    assert "delaytasks -A shop.celery up" in up.stderr
