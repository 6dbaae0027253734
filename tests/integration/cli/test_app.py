"""Test how commands find the Celery app, and the errors of an app that cannot be used."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from delaytasks.cli.main import main
from tests.integration.cli.project import Project, write
from tests.services import free_port

CELERY = "from celery import Celery"


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (None, "named 'absent'; run the command in the folder of the module, or set PYTHONPATH"),
        ("import nowhere_at_all", "nowhere_at_all"),
        ("x = 1", "has no Celery app"),
        ("app = object()", "is no Celery app but a object"),
        (f"{CELERY}; app = Celery('plain')", "has no delayed tasks; make one with DelayTasks(app)"),
    ],
)
def test_an_unusable_app_exits_with_2_and_names_the_reason(
    bare: Project, request: pytest.FixtureRequest, module: str | None, says: str
) -> None:
    name = "absent" if module is None else write(f"app_{abs(hash(module))}", module)
    request.addfinalizer(lambda: sys.modules.pop(name, None))
    said = CliRunner().invoke(main, ["-A", name, "list", "--json"])
    assert (said.exit_code, said.stdout) == (2, "")
    assert says in json.loads(said.stderr)["error"]
    assert json.loads(said.stderr)["type"] == "ConfigError"


def test_an_error_inside_the_app_s_module_is_shown_with_its_place(bare: Project) -> None:
    said = CliRunner().invoke(main, ["-A", write("app_that_breaks", "\n\n1 / 0"), "list"])
    assert said.exit_code == 2
    assert "app_that_breaks.py" in said.stderr
    assert "line 3" in said.stderr
    assert said.stderr.endswith(
        "Error: importing the app 'app_that_breaks' failed: ZeroDivisionError: division by zero\n"
    )


def test_the_app_comes_from_the_environment(shop: Project) -> None:
    shop.schedule(delay=60)
    shop.patch.setenv("DELAYTASKS_APP", f"{shop.name}:app")
    said = CliRunner().invoke(main, ["list", "--json"])
    assert len(json.loads(said.stdout)["tasks"]) == 1


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
    assert answer("run")["succeeded"] == 1


@pytest.mark.parametrize(
    ("imported", "missing", "is_traced"),
    [("taks", "taks", False), ("taks.mail", "taks", False), ("late_work", "requsts", True)],
)
def test_a_module_that_the_app_imports_in_vain_is_one_line_if_its_own_name_is_wrong(
    bare: Project, forget: Callable[..., None], imported: str, missing: str, is_traced: bool
) -> None:
    app = f"{CELERY}; app = Celery('late', include=['{imported}'], set_as_current=False)"
    forget(write("late_app", app), write("late_work", "import requsts"))
    said = CliRunner().invoke(main, ["-A", "late_app", "list"])
    assert said.exit_code == 2
    fact = f"failed: ModuleNotFoundError: No module named '{missing}'"
    where = "Error: importing what the app's imports and include name"
    assert said.stderr.endswith(f"{where} {fact}\n")
    assert ("Traceback" in said.stderr) is is_traced
    assert is_traced or len(said.stderr.splitlines()) == 1


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
