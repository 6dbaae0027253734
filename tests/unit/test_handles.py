"""Handles of processors: they are functions to their callers, and schedule tasks of their tags."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from delaytasks import DelayTask, DelayTasks, InvalidScheduleError, Processor, StaleVersionError
from delaytasks.runtime import runtime_of
from tests.recording import delays_on, record

AT = datetime(2031, 1, 1, tzinfo=timezone.utc)
delays = DelayTasks(Celery("handles"), "sqlite://")


@delays.processor("module.close", queue="slow")
def close_order(body: dict[str, int], task: DelayTask | None = None) -> int:
    """Close an order."""
    return body["order"]


def test_a_handle_is_called_like_its_function_and_looks_like_it() -> None:
    assert isinstance(close_order, Processor)
    assert close_order({"order": 7}) == 7
    assert (close_order.__name__, close_order.__doc__) == ("close_order", "Close an order.")
    assert close_order.__module__ == __name__
    assert list(inspect.signature(close_order).parameters) == ["body", "task"]
    assert repr(close_order) == f"<Processor 'module.close': {__name__}.close_order>"


def test_a_handle_is_pickled_by_its_name() -> None:
    assert pickle.loads(pickle.dumps(close_order)) is close_order


def test_handles_of_coroutines_and_batches_can_be_called() -> None:
    @delays.processor("module.ask")
    async def ask(body: int) -> int:
        return body + 1

    @delays.processor("module.store", batch=10)
    def store(bodies: list[int], tasks: list[DelayTask]) -> int:
        return len(bodies)

    assert asyncio.run(ask(1)) == 2
    assert store([1, 2], []) == 2
    if sys.version_info >= (3, 12):
        assert inspect.iscoroutinefunction(ask)


def test_a_function_can_have_several_tags_and_the_registry_gets_the_function_itself() -> None:
    @delays.processor("module.one")
    @delays.processor("module.two")
    def both(body: int) -> int:
        return body

    registry = runtime_of(delays).registry
    specs = {spec.tag: spec for spec in registry}
    functions = [specs[tag].function for tag in ("module.one", "module.two")]
    assert functions[0] is functions[1] is both.function
    assert both.tag == "module.one"


def test_functions_of_classes_are_bound_as_usual() -> None:
    class Shop:
        name = "shop"

        @staticmethod
        @delays.processor("module.static")
        def static(body: str) -> str:
            return body

        @delays.processor("module.plain")
        def plain(self, body: str) -> str:
            return self.name + body

        def bound(self, body: str) -> str:
            return self.name + body

    shop: Any = Shop()
    assert Shop.static("a") == shop.static("a") == "a"
    assert shop.plain("!") == "shop!"
    assert shop.plain.tag == "module.plain"
    assert delays.processor("module.bound")(shop.bound)("?") == "shop?"


def test_a_handle_schedules_finds_and_cancels_tasks_of_its_tag(tmp_path: Path) -> None:
    own = delays_on(f"sqlite:///{tmp_path}/tasks.sqlite3", tags=["mail.other"])
    with runtime_of(own).store.database.begin() as connection:
        own.create_tables(connection)
    record(own)

    @own.processor("mail.send", queue="mail")
    def send(body: Any) -> None: ...

    own.schedule_delay("mail.other", {}, 60)
    first = send.schedule({"n": 1}, "1h", key="1", priority=3)
    second = send.schedule_at({"n": 2}, AT)
    assert (first.tag, first.queue, first.key, first.priority) == ("mail.send", "mail", "1", 3)
    assert second.expected_time == AT
    with pytest.raises(InvalidScheduleError):
        send.schedule({"n": 1}, 5, max_wait=5)
    assert send.schedule({"n": 3}, 5, key="1", on_conflict="keep").id == first.id
    many = [({"n": n}, timedelta(minutes=n)) for n in range(3)]
    assert send.schedule_many([*many, ({"n": 9}, AT)], queue="bulk") == 4
    assert len(send.find()) == 6
    assert len(send.find(queue="bulk", until=AT)) == 3
    assert send.schedule_many([({"n": 5}, 5)], key="1", on_conflict="keep") == 0
    with pytest.raises(StaleVersionError):
        send.cancel(key="1", version=first.version + 1)
    assert send.cancel(key="1")
    assert not send.cancel(key="1")
    with runtime_of(own).store.database.begin() as connection:
        send.schedule({"n": 4}, 5, session=connection)
        connection.rollback()
    assert len(send.find()) == 6


def test_the_module_level_decorator_makes_handles_of_the_default_instance() -> None:
    code = (
        "import delaytasks, sys\n"
        "@delaytasks.processor('a')\n"
        "def work(body): return body\n"
        "assert isinstance(work, delaytasks.Processor) and work(5) == 5\n"
        "assert 'sqlalchemy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
