"""A Celery app with delaytasks keeps its classes, and its internals are as we need them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.pool import ApplyResult
from celery import Celery
from celery.app.control import Control
from celery.concurrency.prefork import TaskPool
from kombu.asynchronous import Hub

from delaytasks import DelayTasks, StoreError
from delaytasks.worker.patches import pass_over_exited_processes
from tests.world import MonkeyPatch, World

# -- undocumented names whose absence would cause no error ----------------------------------------

# Every other name of Celery's that delaytasks uses without documentation raises an error in the
# tests of workers if a release changes it.


def bare_app(**options: Any) -> Celery:
    return Celery("internals", broker="memory://", set_as_current=False, **options)


@pytest.fixture(scope="module")
def pool() -> Iterator[TaskPool]:
    app = bare_app()
    made = TaskPool(1, app=app, initargs=(app, "internals"), threads=False, putlocks=False)
    made.start()
    yield made
    made.terminate()


def test_a_prefork_pool_has_the_names_that_delaytasks_looks_for(pool: TaskPool) -> None:
    workers = pool._pool
    assert isinstance(workers._busy_workers, set)
    assert isinstance(workers._pool[0].inqW_fd, int)
    assert pool.info["processes"] == [workers._pool[0].pid]
    result = ApplyResult({}, None)
    assert result._cache == {result._job: result}
    assert list(result.worker_pids()) == []
    names = ("_write_to", "_on_timeout_set", "_timeout", "_soft_timeout")
    assert [getattr(result, name) for name in names] == [None] * 4


def test_a_worker_connects_again_while_a_process_of_its_pool_has_exited(pool: TaskPool) -> None:
    pass_over_exited_processes(pool)
    workers, hub = pool._pool, Hub()
    workers._track_child_process(SimpleNamespace(_sentinel_poll=None), hub)
    assert not hub.readers
    living = workers._pool[0]
    workers._track_child_process(living, hub)
    assert list(hub.readers) == [living._sentinel_poll]
    workers._untrack_child_process(living, hub)
    hub.close()


# -- A Celery app with delaytasks keeps its own classes and signatures ----------------------------


class OwnControl(Control):
    """A control class of the project."""

    greeting = "hello"


@pytest.fixture
def revoked(monkeypatch: MonkeyPatch) -> list[Any]:
    """The arguments with which rows are revoked; nothing is broadcast."""
    seen: list[Any] = []
    revoke = "delaytasks.durable_eta.messages.CeleryTasks.revoke"
    monkeypatch.setattr(revoke, lambda self, ids: seen.append(ids))
    monkeypatch.setattr(Control, "broadcast", lambda self, command, *_, **__: command)
    return seen


Make = Callable[[Celery], Celery]


@pytest.fixture
def make_app(tmp_path: Path) -> Iterator[Make]:
    """Give an app an instance that has no tables."""
    with ExitStack() as stack:

        def make(app: Celery) -> Celery:
            url = f"sqlite:///{tmp_path}/shop.sqlite3"
            stack.enter_context(closing(DelayTasks(app, url, durable_eta=True)))
            return app

        yield make


@pytest.mark.parametrize("control", [None, OwnControl, f"{__name__}:OwnControl"])
def test_each_way_to_revoke_cancels_rows(make_app: Make, revoked: list[Any], control: Any) -> None:
    app = bare_app(control=control)
    assert control is not None or app.control, "a control object that exists is replaced"
    make_app(app)
    assert app.control.revoke("a", terminate=True) == "revoke"
    app.control.revoke(["b", "c"])
    app.control.terminate("d")
    app.AsyncResult("e").revoke()
    app.control.broadcast("revoke", task_id=["f"])
    app.control.ping()
    assert revoked == [["a"], ["b", "c"], ["d"], ["e"], ["f"]]
    assert control is None or app.control.greeting == "hello"


def test_workers_get_a_revoke_without_a_database(make_app: Make, monkeypatch: MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Control, "broadcast", lambda self, command, *_, **__: told.append(command))
    with pytest.raises(StoreError):
        make_app(bare_app()).control.revoke("a")
    assert told == ["revoke"]


def test_send_task_shows_celerys_signature(make_app: Make) -> None:
    signatures = [inspect.signature(app.send_task) for app in (make_app(bare_app()), bare_app())]
    assert signatures[0] == signatures[1]


def test_a_call_by_name_finds_the_options_of_a_task_that_was_just_declared(world: World) -> None:
    app = world.runtime.celery

    @app.task(name="remind", durable_eta=True)
    def remind() -> None: ...

    assert not app.finalized
    sent = app.send_task("remind", countdown=60)
    assert [task.key for task in world.delays.find().tasks] == [sent.id]
