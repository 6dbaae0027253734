"""Only the owner can read the data folder and its files, whatever the umask is."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery
from kombu import Connection
from sqlalchemy import text

from delaytasks import DelayTasks
from delaytasks.attachment import file_broker_url
from delaytasks.core.private_files import make_folder, tighten_data_folder, tighten_folder
from delaytasks.runtime import runtime_of
from delaytasks.storage import migrations

pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DELAYTASKS_DATABASE_URL", raising=False)
    return tmp_path / "project" / ".delaytasks"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of a folder and of everything in it."""
    return {
        str(path.relative_to(folder.parent)): mode(path) for path in (folder, *folder.rglob("*"))
    }


def assert_private(folder: Path) -> None:
    found = modes(folder)
    assert len(found) > 1
    assert {name: oct(each) for name, each in found.items() if each & 0o077} == {}


def opened(data: Path) -> DelayTasks:
    delays = DelayTasks(
        Celery("private", broker="memory://", set_as_current=False), data_dir=str(data)
    )
    migrations.upgrade(runtime_of(delays).store.database)
    return delays


def test_the_embedded_database_is_made_private_with_all_its_files(
    open_umask: None, data: Path
) -> None:
    delays = opened(data)
    delays.schedule_delay("mail", {"card": 1}, 60)
    with runtime_of(delays).store.database.begin() as connection:
        connection.execute(text("DELETE FROM yb_delay_task_message"))
        assert {path.name for path in data.iterdir()} >= {
            "delays.sqlite3",
            "delays.sqlite3-wal",
            "delays.sqlite3-shm",
        }
        assert_private(data)
    delays.close()
    assert mode(data) == 0o700
    assert mode(data / "delays.sqlite3") == 0o600


def test_files_that_an_earlier_version_left_open_are_made_private(
    open_umask: None, data: Path
) -> None:
    data.mkdir(parents=True, mode=0o755)
    opened(data).close()
    for name in (
        "delays.sqlite3",
        "delays.sqlite3-wal",
        "delays.sqlite3-shm",
        "celerybeat-schedule.db",
    ):
        (data / name).touch()
        (data / name).chmod(0o644)
    data.chmod(0o755)
    runtime_of(
        DelayTasks(Celery("later", broker="memory://", set_as_current=False), data_dir=str(data))
    ).store.close()
    assert_private(data)
    assert mode(data) == 0o700


def test_the_broker_of_files_is_private(open_umask: None, data: Path) -> None:
    (data / "broker").mkdir(parents=True, mode=0o755)
    with Connection(file_broker_url(str(data))) as connection:
        connection.SimpleQueue("orders").put({"card": 1})
        assert any(path.suffix == ".msg" for path in data.rglob("*"))
        assert_private(data)


def test_a_shared_folder_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, shared, linked = tmp_path / "project", tmp_path / "shared", tmp_path / "linked"
    for folder, given in ((tmp_path, 0o755), (project, 0o755), (shared, 0o1777)):
        folder.mkdir(exist_ok=True)
        folder.chmod(given)
    monkeypatch.chdir(project)
    for folder, given in ((tmp_path, 0o755), (project, 0o755), (shared, 0o1777)):
        tighten_folder(folder)
        assert mode(folder) == given
    (project / "delays.sqlite3").touch(mode=0o644)
    (project / "orders.sqlite3").touch(mode=0o644)
    tighten_data_folder(Path("."))
    assert [mode(project / name) for name in ("delays.sqlite3", "orders.sqlite3")] == [0o600, 0o644]
    make_folder(linked)
    make_folder(linked)
    assert mode(linked) == 0o700
