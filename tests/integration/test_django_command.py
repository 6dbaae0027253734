"""Test `manage.py delays`, which runs the command line with Django's settings."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from delaytasks.cli.main import main
from delaytasks.runtime import runtime_of

pytest.importorskip("django")

from django.core.management import CommandError, call_command

from delaytasks import Status
from delaytasks.contrib.django.instance import DjangoDelays
from delaytasks.contrib.django.management.commands import delays as command
from delaytasks.storage import migrations
from tests.integration import django_settings
from tests.integration.test_django import django  # noqa: F401


@pytest.fixture
def delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DjangoDelays]:
    """Return the project's instance, on an SQLite file."""
    django_settings.add_database("commanded", f"sqlite:///{tmp_path / 'shop.sqlite3'}")
    made = DjangoDelays(django_settings.new_celery_app(), "commanded", tags="any")
    migrations.upgrade(runtime_of(made).store.database)
    monkeypatch.setattr(command, "project_delays", lambda: made)
    yield made
    made.close()
    django_settings.remove_database("commanded")


def manage(*arguments: str) -> int | str | None:
    """Run `manage.py delays …` as Django does, and return its exit code."""
    with pytest.raises(SystemExit) as caught:
        command.Command().run_from_argv(["./manage.py", "delays", *arguments])
    return caught.value.code


def test_a_command_uses_the_database_of_djangos_settings(
    delays: DjangoDelays, capsys: pytest.CaptureFixture[str]
) -> None:
    task = delays.schedule_delay("order.close", {"order": 7}, 60)
    assert manage("show", str(task.id), "--json") == 0
    assert json.loads(capsys.readouterr().out)["body"] == {"order": 7}


def test_options_of_manage_py_may_be_anywhere_and_others_are_passed_on(
    delays: DjangoDelays, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--settings=shop.settings", "schedule", "mail", "--delay", "60"]
    assert manage(*options, "--pythonpath", "src", "--json", "--", "-1") == 0
    assert json.loads(capsys.readouterr().out)["body"] == -1
    assert manage("list", "--set") == 2  # no abbreviation of --settings
    assert "No such option" in capsys.readouterr().err


def test_help_names_the_program(delays: DjangoDelays, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.Command().print_help("manage.py", "delays")
    shown = capsys.readouterr().out
    assert "Usage: manage.py delays" in shown
    assert "reschedule" in shown


def test_manage_py_has_the_commands_of_the_command_line(
    delays: DjangoDelays, capsys: pytest.CaptureFixture[str]
) -> None:
    def names(shown: str) -> list[str]:
        return re.findall(r"^  ([a-z][a-z-]*)  ", shown.partition("Commands:")[2], re.MULTILINE)

    assert manage("--help") == 0
    found = names(capsys.readouterr().out)
    assert found == names(CliRunner().invoke(main, ["--help"]).output)
    assert "list" in found
    for name in found:
        assert manage(name, "--help") == 0
        assert f"Usage: manage.py delays {name} " in capsys.readouterr().out


def test_drain_runs_the_tasks_of_djangos_database(delays: DjangoDelays) -> None:
    orders: list[Any] = []
    delays.processor("order.close")(orders.append)
    tasks = [delays.schedule_delay("order.close", number, 0) for number in range(3)]
    assert manage("run") == 0
    assert sorted(orders) == [0, 1, 2]
    assert {delays.get(task).status for task in tasks} == {Status.DONE}


def test_call_command_returns_the_output_and_raises_the_error(delays: DjangoDelays) -> None:
    def call(*arguments: str) -> Any:
        output = io.StringIO()
        call_command("delays", *arguments, stdout=output)
        return json.loads(output.getvalue())

    task = call("schedule", "mail", "{}", "--delay", "60", "--json")
    assert [each["id"] for each in call("list", "--json")["tasks"]] == [task["id"]]
    with pytest.raises(CommandError, match="7") as caught:
        call_command("delays", "show", "7")
    assert caught.value.returncode == 1
