"""A process imports the modules of an optional feature only if it uses the feature."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: A deployment with one database, without encryption and partitions, does not need these modules.
OPTIONAL = (
    "cryptography",
    "delaytasks.encryption",
    "delaytasks.partitions",
    "delaytasks.sharding.growth",
)
RUN = """
from celery import Celery
from delaytasks import DelayTasks
from delaytasks.wiring import wiring_of
done = []
delays = DelayTasks(Celery("shop", broker="memory://"), "sqlite:///{path}", **{settings})
delays.processor("mail")(done.append)
with wiring_of(delays).store.database.begin() as connection:
    wiring_of(delays).store.schema.metadata.create_all(connection)
wiring_of(delays).checks.check_ready()
task = delays.schedule_delay("mail", {{"to": "ada"}}, 0)
wiring_of(delays).sweeper.sweep()
delays.runner().drain("default", [0], 10)
assert done == [{{"to": "ada"}}] and delays.get(task.id).status.name == "DONE"
"""


def imported_by_a_run(path: Path, settings: dict[str, object]) -> set[str]:
    """Schedule, sweep and run a task in a fresh interpreter.

    Return the optional modules that the interpreter has imported.
    """
    script = f"{RUN.format(path=path, settings=settings)}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    names = run.stdout.split()
    assert "delaytasks.execution.runner" in names
    return {
        module
        for module in OPTIONAL
        if any(name == module or name.startswith(f"{module}.") for name in names)
    }


def test_a_run_with_one_database_imports_no_optional_feature(tmp_path: Path) -> None:
    assert imported_by_a_run(tmp_path / "shop.sqlite3", {}) == set()


def test_encryption_keys_import_encryption_only(tmp_path: Path) -> None:
    keys = {"encryption_keys": ["Y4u4ZQvcCmwmGO5qY2wVH_RvEu3mHPTqVfQ4Dzw9xpE="]}
    imported = imported_by_a_run(tmp_path / "shop.sqlite3", keys)
    assert imported == {"cryptography", "delaytasks.encryption"}
