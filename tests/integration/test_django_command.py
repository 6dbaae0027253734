"""Test `manage.py check` and `manage.py delays` in a Django project."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("django")

from click.testing import CliRunner
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from sqlalchemy import text

from delaytasks import Status
from delaytasks.cli.main import main
from delaytasks.contrib.django import apps as checks
from delaytasks.contrib.django.instance import DjangoDelays
from delaytasks.contrib.django.management.commands import delays as command
from delaytasks.db import migrations
from delaytasks.runtime import runtime_of
from tests.integration import django_settings
from tests.integration.test_django import alias, django  # noqa: F401

MakeProject = Callable[..., DjangoDelays]


@pytest.fixture
def make_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeProject]:
    """Return a function that makes the project's instance, on an SQLite file without tables."""
    made: list[DjangoDelays] = []

    def make(
        broker_url: str | None = "memory://", database: str = "checked", **settings: Any
    ) -> DjangoDelays:
        app = django_settings.new_celery_app()
        app.conf.broker_url = broker_url
        made.append(DjangoDelays(app, database, **settings))
        monkeypatch.setattr(checks, "project_delays", lambda: made[-1])
        return made[-1]

    django_settings.add_database("checked", f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    yield make
    for delays in made:
        delays.close()
    django_settings.remove_database("checked")


def found(**options: Any) -> dict[str, str]:
    """Return the messages and hints of our checks by their ids, as `manage.py check` finds them."""
    messages = run_checks(tags=["delaytasks"], **options)
    assert all(message.hint for message in messages)
    return {each.id.removeprefix("delaytasks."): f"{each.msg} {each.hint}" for each in messages}


def test_only_a_wrong_horizon_or_broker_is_a_problem(make_project: MakeProject) -> None:
    migrations.upgrade(runtime_of(make_project()).store.database)
    assert found(databases=["checked"]) == {}
    delays = make_project(horizon=30)
    runtime_of(delays).celery.conf.broker_transport_options = {"visibility_timeout": 20}
    assert list(found()) == ["E001"]
    assert "lower the horizon" in found()["E001"]
    make_project(None)
    assert "CELERY_BROKER_URL" in found()["W001"]
    make_project(None, timer="direct")
    assert found() == {}


def test_tables_that_are_missing_or_of_another_version_are_reported(
    make_project: MakeProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = runtime_of(make_project()).store.database
    assert "manage.py migrate" in found(databases=["checked"])["W003"]
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["manage.py", "migrate"])
        assert "W003" not in found(databases=["checked"]), "this command makes them"
    migrations.upgrade(database)
    for revision in ("9999", "0000"):
        with database.begin() as connection:
            table = migrations.version_table("")
            connection.execute(text(f"UPDATE {table} SET version_num = '{revision}'"))
        if revision == "9999":  # this version works with tables of a newer one
            assert found(databases=["checked"]) == {}
    message = found(databases=["checked"])["W003"]
    assert "revision 0000" in message
    assert "manage.py migrate" in message


# -- `manage.py delays`, which runs the command line with the settings of Django ------------------


@pytest.fixture
def commanded(make_project: MakeProject, monkeypatch: pytest.MonkeyPatch) -> DjangoDelays:
    """Return the project's instance, with tables."""
    made = make_project(tags="any")
    migrations.upgrade(runtime_of(made).store.database)
    monkeypatch.setattr(command, "project_delays", lambda: made)
    return made


def manage(*arguments: str) -> int | str | None:
    """Run `manage.py delays …` as Django does, and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        command.Command().run_from_argv(["./manage.py", "delays", *arguments])
    return caught.value.code


def test_options_of_manage_py_may_be_anywhere_and_others_are_passed_on(
    commanded: DjangoDelays, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--settings=shop.settings", "schedule", "mail", "--delay", "60"]
    assert manage(*options, "--pythonpath", "src", "--json", "--", "-1") == 0
    assert json.loads(capsys.readouterr().out)["body"] == -1
    assert manage("list", "--set") == 2  # no abbreviation of --settings
    assert "No such option" in capsys.readouterr().err


def test_manage_py_has_the_commands_of_the_command_line(
    commanded: DjangoDelays, capsys: pytest.CaptureFixture[str]
) -> None:
    def names(shown: str) -> list[str]:
        return re.findall(r"^  ([a-z][a-z-]*)  ", shown.partition("Commands:")[2], re.MULTILINE)

    with pytest.raises(SystemExit):
        command.Command().print_help("manage.py", "delays")
    shown = capsys.readouterr().out
    assert "Usage: manage.py delays" in shown
    assert "reschedule" in shown
    assert manage("--help") == 0
    found = names(capsys.readouterr().out)
    assert found == names(CliRunner().invoke(main, ["--help"]).output)
    assert "list" in found
    for name in found:
        assert manage(name, "--help") == 0
        assert f"Usage: manage.py delays {name} " in capsys.readouterr().out


def test_call_command_returns_the_output_and_raises_the_error(commanded: DjangoDelays) -> None:
    def call(*arguments: str) -> Any:
        output = io.StringIO()
        call_command("delays", *arguments, stdout=output)
        return json.loads(output.getvalue())

    bodies: list[Any] = []
    commanded.processor("mail")(bodies.append)
    task = call("schedule", "mail", "{}", "--delay", "0", "--json")
    assert [each["id"] for each in call("list", "--json")["tasks"]] == [task["id"]]
    assert call("run", "--json")["succeeded"] == len(bodies) == 1
    assert commanded.get(task["id"]).status is Status.DONE
    with pytest.raises(CommandError, match="7") as caught:
        call_command("delays", "show", "7")
    assert caught.value.returncode == 1
