"""Test `check` and `db upgrade`, and how all commands find the Celery app."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from delaytasks.cli.main import main
from delaytasks.operate.state import NO_STANDBY
from tests.integration.cli.conftest import Project, write
from tests.services import RedisServer, free_port


def test_status_reports_an_unavailable_broker_and_waits_for_no_silent_one(shop: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for port in (free_port(), mute.getsockname()[1]):
            shop.patch.setenv("CELERY_BROKER_URL", f"redis://:canary@127.0.0.1:{port}/0")
            sys.modules.pop(shop.name).delays.close()
            assert shop.json("status")["broker"]["is_up"] is False
            assert "canary" not in shop("status", "--json").output + shop("status").output


def test_status_says_whether_the_redis_of_the_timer_answers(
    shop: Project, start_redis: Callable[..., RedisServer]
) -> None:
    redis = start_redis()
    shop.patch.setenv("DELAYTASKS_TIMER", redis.url)
    sys.modules.pop(shop.name).delays.close()
    assert shop.json("status")["timer"] == {"name": "redis", "is_up": True}
    redis.stop()
    assert re.search(r"(?m)^timer +redis: down$", shop("status").stdout)


def test_check_settings_has_the_origin_of_each_setting_and_no_password(bare: Project) -> None:
    bare.patch.setenv("DELAYTASKS_LEASE", "33s")
    database = "postgresql://me:canary@db.example/shop?sslpassword=canary"
    bare.patch.setenv("DELAYTASKS_DATABASE_URL", database)
    found = bare.json("check", "--settings")
    assert [*found] == ["settings"]
    settings = {each["name"]: (each["value"], each["origin"]) for each in found["settings"]}
    assert settings["delaytasks_lease"] == ("33s", "environment")
    assert settings["delaytasks_sweep"][1] == "default"
    said = bare("check", "--settings")
    assert re.search(r"(?m)^delaytasks_lease +33s +environment ", said.stdout)
    assert "db.example" in said.output
    assert "canary" not in said.output


def test_db_upgrade_creates_the_tables_and_drops_them_on_the_way_back(bare: Project) -> None:
    empty = bare.json("db", "upgrade", "--check", exit_code=1)
    assert (empty["revision"], empty["is_current"]) == (None, False)
    assert bare.error("list", exit_code=1)["type"] == "StoreError"
    assert "db upgrade" in bare.error("list", "--follow", exit_code=1)["error"]
    made = bare.json("db", "upgrade")
    assert (made["revision"], made["is_current"]) == (made["head"], True)
    assert "--yes" in bare.error("db", "upgrade", "--to", "-1", exit_code=2)["error"]
    for revision in ("nowhere", "-9"):
        error = bare.error("db", "upgrade", "--to", revision, "--yes", exit_code=2)
        assert (error["type"], revision in error["error"]) == ("ConfigError", True)
    assert bare.json("db", "upgrade", "--check") == made
    assert bare.json("db", "upgrade", "--to", "base", "--yes")["revision"] is None
    assert "run: delaytasks -A" in bare("db", "upgrade", "--check").stdout


def test_check_warns_of_a_database_that_can_lose_tasks(shop: Project) -> None:
    shop.patch.setattr("delaytasks.cli.status.server_problem", lambda _: NO_STANDBY)
    assert shop.json("check") == {"findings": [], "warning": NO_STANDBY}
    assert re.search(f"^warning: .*: {NO_STANDBY}$", shop("check").stdout, re.MULTILINE)


def test_check_finds_tasks_that_would_not_run_with_this_code(shop: Project) -> None:
    assert shop.json("check") == {"findings": [], "warning": None}
    shop.overdue("mail")
    assert "every waiting task has a processor" in shop("check").stdout
    for delay in (60, 90):
        shop.schedule("gone", delay)
    [finding] = shop.json("check", exit_code=1)["findings"]
    facts = [finding[name] for name in ("tag", "queues", "tasks", "problem")]
    assert facts == ["gone", ["default"], 2, "no processor"]
    assert "2 tasks would not run well with this code" in shop("check").stdout
    shop.insert(id=18, tag="deep", message_body="[" * 100_000)
    shop.delays.processor("deep", schema=dict)(lambda body: None)
    found = {each["tag"]: each["problem"] for each in shop.json("check", exit_code=1)["findings"]}
    assert "recursion" in found["deep"]


# -- How commands find the Celery app, and the errors of an app that cannot be used ---------------


CELERY = "from celery import Celery"
INCLUDES = CELERY + "; app = Celery('late', include=['{}'], set_as_current=False)"
OF_APP = (
    "importing what the app's imports and include name failed: ModuleNotFoundError: No module named"
)


#: A module of an app, what its error says, and whether a traceback shows the place of the error.
UNUSABLE = [
    ("x = 1", "has no Celery app", False),
    ("app = object()", "is no Celery app but a object", False),
    (
        f"{CELERY}; app = Celery('plain')",
        "has no delayed tasks; make one with DelayTasks(app)",
        False,
    ),
    ("\n\n1 / 0", "the app 'unusable' failed: ZeroDivisionError: division by zero", True),
    (INCLUDES.format("taks.mail"), f"{OF_APP} 'taks'", False),
    (INCLUDES.format("late_work"), f"{OF_APP} 'requsts'", True),
    (None, "named 'absent'; run the command in the folder of the module, or set PYTHONPATH", False),
]


@pytest.mark.parametrize(("module", "says", "is_traced"), UNUSABLE)
def test_an_unusable_app_exits_with_2_and_names_the_reason(
    bare: Project, forget: Callable[..., None], module: str | None, says: str, is_traced: bool
) -> None:
    forget(write("unusable", module or ""), write("late_work", "import requsts"))
    command = ["-A", "unusable" if module else "absent", "list"]
    said, plain = (CliRunner().invoke(main, [*command, *more]) for more in (["--json"], []))
    assert (said.exit_code, plain.exit_code, said.stdout) == (2, 2, "")
    error = json.loads(said.stderr)
    assert (says in error["error"], error["type"]) == (True, "ConfigError")
    assert plain.stderr.endswith(f"Error: {error['error']}\n")
    assert ("Traceback" in plain.stderr) is is_traced
    assert is_traced or len(plain.stderr.splitlines()) == 1
    assert "1 / 0" not in str(module) or re.search(r"unusable\.py.* line 3", plain.stderr)


def test_modules_that_the_app_imports_bring_the_instance_and_its_processors(
    shop: Project, forget: Callable[..., None]
) -> None:
    modules = {
        "split_app": f"{CELERY}; app = Celery('s', include=['split_work'], set_as_current=False)",
        "split_delays": "from split_app import app; from delaytasks import DelayTasks; "
        "delays = DelayTasks(app)",
        "split_work": "from split_delays import delays; "
        "delays.processor('here', queue='own')(lambda body: None)",
    }
    forget(*(write(*module) for module in modules.items()))

    def answer(*arguments: str) -> Any:
        for name in modules:  # import them again, like a new process
            sys.modules.pop(name, None)
        said = CliRunner().invoke(main, ["-A", "split_app", *arguments, "--json"])
        assert said.exit_code == 0, said.output
        return json.loads(said.stdout)

    assert answer("schedule", "here", "--delay", "0")["queue"] == "own"
    shop.patch.setenv("DELAYTASKS_APP", f"{shop.name}:app")
    assert "here" in CliRunner().invoke(main, ["list"]).stdout, "the app of the environment"
    assert answer("run")["succeeded"] == 1


def test_a_wrong_setting_ends_with_2_and_a_database_that_is_away_with_1(bare: Project) -> None:
    bare.patch.setenv("DELAYTASKS_HORIZON", "-1")
    assert bare.error("list", exit_code=2)["type"] == "ConfigError"
    bare.patch.setenv("DELAYTASKS_HORIZON", "3600")
    bare.patch.setenv("CELERY_BROKER_URL", "redis://127.0.0.1:1/0")
    sys.modules.pop(bare.name).delays.close()
    assert "visibility_timeout" in bare.error("check", exit_code=2)["error"]
    bare.patch.delenv("DELAYTASKS_HORIZON")
    url = f"postgresql://me:canary@127.0.0.1:{free_port()}/shop"
    bare.patch.setenv("DELAYTASKS_DATABASE_URL", url)
    sys.modules.pop(bare.name).delays.close()
    said = bare("cancel", "1", "2", "3", "--json")
    assert said.exit_code == 1
    assert json.loads(said.stderr)["type"] == "StoreUnavailableError"
    assert len(json.loads(said.stdout)["failed"]) == 1
    assert "canary" not in said.output
