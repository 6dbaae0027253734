"""A Celery app with delaytasks keeps its classes, and its internals are as we need them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import amqp
import billiard
import celery
import kombu
import pytest
import redis
from celery import Celery
from celery.app.control import Control

from delaytasks import DelayTasks
from delaytasks.core.errors import StoreError
from delaytasks.runtime import runtime_of
from tests.celery_shapes import SHAPES, Worker

# -- the undocumented names of Celery and its libraries behave as delaytasks requires -------------


LIBRARIES = (amqp, billiard, celery, kombu, redis)
INSTALLED = ", ".join(f"{library.__name__} {library.__version__}" for library in LIBRARIES)
NAMES = [(owner, name) for owner, shapes in SHAPES.items() for name in shapes]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def attribute(worker: Worker, owner: str, name: str) -> Any:
    """Return the attribute `name` of `owner`, or raise `AttributeError` if it does not exist."""
    made = worker.of(owner)
    if made is not None:
        return getattr(made, name)
    try:
        return getattr(importlib.import_module(owner), name)
    except ModuleNotFoundError:
        module, _, kind = owner.rpartition(".")
        return getattr(getattr(importlib.import_module(module), kind), name)


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_a_name_that_is_not_documented_is_as_delaytasks_needs_it(
    owner: str, name: str, worker: Worker
) -> None:
    try:
        found = attribute(worker, owner, name)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"delaytasks uses {owner}.{name}: {error} (installed: {INSTALLED})")
    assert SHAPES[owner][name](found), f"{found!r} has changed (installed: {INSTALLED})"


# -- A Celery app with delaytasks keeps its own classes and signatures ----------------------------


class OwnControl(Control):
    """A control class of the project."""

    greeting = "hello"


@pytest.fixture
def revoked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments with which rows are revoked; nothing is broadcast."""
    seen: list[Any] = []
    revocations = "delaytasks.operations.durable_calls.Revocations"
    monkeypatch.setattr(f"{revocations}.revoke", lambda self, ids: seen.append(ids))
    monkeypatch.setattr(
        f"{revocations}.revoke_by_stamped_headers", lambda self, headers: seen.append(headers)
    )
    monkeypatch.setattr(Control, "broadcast", lambda self, command, *_, **__: command)
    return seen


def app_with(tmp_path: Path, **options: Any) -> Celery:
    app = Celery("shop", broker="memory://", set_as_current=False, **options)
    DelayTasks(app, f"sqlite:///{tmp_path}/shop.sqlite3", durable_eta=True)
    return app


@pytest.mark.parametrize("control", [None, OwnControl, f"{__name__}:OwnControl"])
def test_each_way_to_revoke_tasks_cancels_their_rows(
    tmp_path: Path, revoked: list[Any], control: Any
) -> None:
    app = app_with(tmp_path, control=control)

    assert app.control.revoke("a", terminate=True) == "revoke"
    app.control.revoke(["b", "c"])
    app.control.terminate("d")
    app.AsyncResult("e").revoke()
    app.control.broadcast("revoke", task_id=["f"])
    app.control.ping()
    app.control.broadcast("revoke_by_stamped_headers", {"headers": {"tenant": "acme"}})

    assert revoked == [["a"], ["b", "c"], ["d"], ["e"], ["f"], {"tenant": "acme"}]
    assert control is None or app.control.greeting == "hello"
    runtime_of(app.delaytasks).close()


def test_a_control_object_that_exists_already_is_replaced(
    tmp_path: Path, revoked: list[Any]
) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    assert app.control is not None
    delays = DelayTasks(app, f"sqlite:///{tmp_path}/shop.sqlite3")

    app.control.revoke("a")

    assert revoked == [["a"]]
    delays.close()


def test_workers_receive_the_revoke_even_if_the_database_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(Control, "broadcast", lambda self, command, *_, **__: told.append(command))
    app = Celery("shop", broker="memory://", set_as_current=False)
    DelayTasks(app, f"sqlite:///{tmp_path}/without_tables.sqlite3")

    with pytest.raises(StoreError):
        app.control.revoke("a")

    assert told == ["revoke"]
    runtime_of(app.delaytasks).close()


def test_send_task_shows_celerys_signature(tmp_path: Path) -> None:
    bare = Celery("bare", broker="memory://", set_as_current=False)

    app = app_with(tmp_path)

    assert inspect.signature(app.send_task) == inspect.signature(bare.send_task)


def test_a_call_by_name_finds_the_options_of_a_task_that_was_just_declared(tmp_path: Path) -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    delays = DelayTasks(app, f"sqlite:///{tmp_path}/shop.sqlite3")
    with runtime_of(delays).store.database.begin() as connection:
        delays.create_tables(connection)

    @app.task(name="remind", durable_eta=True)
    def remind() -> None: ...

    assert not app.finalized
    sent = app.send_task("remind", countdown=60)
    found = [task.key for task in delays.find().tasks]
    assert found == [sent.id]
    delays.close()
