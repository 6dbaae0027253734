"""The public API: names, options and ids."""

from __future__ import annotations

import asyncio
import gc
import inspect
import mmap
import re
import struct
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import fields
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import delaytasks
from delaytasks import DelayedTask, DelayTasks, NewTask, Processor, Status
from delaytasks.operate.operations import OPERATIONS
from tests.conftest import open_store
from tests.waiting import in_child
from tests.world import World
from tests.world.recording import ManualClock, delays_on

# -- client ---------------------------------------------------------------------------------------


def is_twin(member: Any) -> bool:
    return inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member)


#: The public methods that wait for nothing, and `result`, whose twin occupies no thread.
WITHOUT_TWIN = {"new_id", "processor", "transaction", "result"}


GROUPS = ["bulk", "callbacks", "policies", "recurring", "statistics"]


@pytest.mark.parametrize("name", ["delays", "handle", *GROUPS])
def test_each_waiting_method_has_a_twin_with_its_parameters(delays: DelayTasks, name: str) -> None:
    kinds: dict[str, type] = {"delays": DelayTasks, "handle": Processor}
    kind = kinds.get(name) or type(getattr(delays, name))
    public = inspect.getmembers(kind, lambda each: inspect.isfunction(each) and not is_twin(each))
    methods = {name: method for name, method in public if name[0] != "_"}
    for name in methods.keys() - WITHOUT_TWIN:
        twin = getattr(kind, f"a{name}")
        assert is_twin(twin), name
        assert (twin.__name__, twin.__module__) == (f"a{name}", methods[name].__module__)
        if name != "check":  # its twin is an iterator
            assert inspect.signature(twin) == inspect.signature(methods[name])
        assert f"the asynchronous twin of `{name}`" in twin.__doc__


@pytest.fixture
def delays(sqlite_path: Callable[..., str]) -> Iterator[DelayTasks]:
    open_store(sqlite_path()).close()
    with closing(delays_on(sqlite_path(), tags="any")) as delays:
        yield delays


def test_a_closed_instance_is_freed(sqlite_path: Callable[..., str]) -> None:
    open_store(sqlite_path()).close()
    delays = delays_on(sqlite_path(), tags="any")
    delays.schedule_delay("mail", None, 60)
    delays.close()
    left = weakref.ref(delays)
    del delays
    gc.collect()
    assert left() is None


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"countdown": 5}, "countdown= is Celery's: write the seconds as the third argument"),
    ({"eta": datetime.max}, "eta= is Celery's: write at="),
    ({"expires": 5}, "expires= is Celery's: write max_late="),
    ({"keys": "7"}, "unexpected keyword argument 'keys'"),
    ({"delay": datetime.now(timezone.utc)}, "pass an instant as at="),
    ({"delay": 5, "at": datetime.now(timezone.utc)}, "delay"),
]


@pytest.mark.parametrize(("options", "advice"), WRONG)
def test_a_wrong_call_is_an_error_that_names_the_argument(
    delays: DelayTasks, options: Any, advice: str
) -> None:
    mail = delays.processor("mail")(lambda body: None)
    for call in (partial(delays.schedule_delay, "mail", {}), partial(mail.schedule, {})):
        with pytest.raises((TypeError, delaytasks.InvalidInputError), match=re.escape(advice)):
            call(**options)
    assert not delays.find().tasks


def test_a_call_that_blocks_the_event_loop_warns(delays: DelayTasks) -> None:
    mail = delays.processor("mail")(lambda body: None)

    async def work() -> None:
        with pytest.warns(RuntimeWarning, match="schedule blocks .* await aschedule$"):
            mail.schedule({}, 5)
        with pytest.warns(RuntimeWarning, match="await aschedule_delay") as caught:
            delays.schedule_delay("mail", {}, 5)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            await delays.aschedule_delay("mail", {}, 5)

    asyncio.run(work())
    assert len(delays.find()) == 3


# -- the functions of the package -----------------------------------------------------------------

#: The beginning of a script, in an empty folder, that calls the functions of the package.
STANDALONE = """
import os
os.chdir({folder!r})
import threading
from celery import Celery, current_app
from sqlalchemy import create_engine
import delaytasks
from delaytasks.testing import create_tables

def schedule():
    try:
        task = delaytasks.schedule_delay("mail", {{}}, 60)
        print(*[name for name in made if made[name].find(ids=task.id).tasks])
    except delaytasks.ConfigError as error:
        print(error)

def schedule_twice():
    schedule()
    thread = threading.Thread(target=schedule)
    thread.start()
    thread.join()

made = {{}}
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], list[str]]:
    """Run a script in an empty folder, and return the lines that it prints."""

    def run(code: str) -> list[str]:
        script = STANDALONE.format(folder=str(tmp_path)) + code
        said = subprocess.check_output([sys.executable, "-c", script], text=True, timeout=120)
        return said.splitlines()

    return run


Run = Callable[[str], list[str]]


def test_the_functions_use_the_instance_of_the_current_app_or_the_newest_one(run: Run) -> None:
    code = """
app = Celery("shop", broker="memory://")
schedule_twice()
print(os.listdir("."))
for name in ("old", "new"):
    made[name] = delaytasks.DelayTasks(Celery(name, broker="memory://"), f"sqlite:///{name}.sqlite3")
    with create_engine(f"sqlite:///{name}.sqlite3").begin() as connection:
        create_tables(connection, made[name])
schedule()
Celery("without", broker="memory://")
schedule_twice()
made["old"]._celery.set_current()
schedule()
delaytasks.processor("mail")(lambda body: None)
print(made["old"]._registry.get("mail") is not None, made["new"]._registry.get("mail") is None)
"""
    without, in_thread, files, *said = run(code)
    assert without.startswith("the Celery app 'shop' has no DelayTasks: write delays = DelayTasks(")
    assert (in_thread, files) == (without, "[]")
    assert said == ["new", "new", "new", "old", "True True"]


def test_a_process_without_a_celery_app_has_the_standalone_instance(run: Run) -> None:
    code = """
current_app.main  # Celery makes an app of its own
print(delaytasks.current_delays() is __import__("delaytasks.celery", fromlist=["delays"]).delays)
"""
    assert run(code) == ["True"]


# -- task options ---------------------------------------------------------------------------------


#: Each way to schedule a task has these arguments in a form of its own.
OPTIONS = {*NewTask._fields} - {"tag", "body", "delay", "at"}
#: The JSON value of a task does not have these fields.
HIDDEN = {"cancel_request", "attempts"}


def test_each_way_to_schedule_a_task_has_its_options() -> None:
    documented = (DelayTasks.schedule_delay.__doc__ or "").partition("Returns")[0]
    assert set(re.findall(r"^ +(\w+) : .*, optional$", documented, re.MULTILINE)) == OPTIONS
    assert {parameter.name for parameter in OPERATIONS["schedule"].parameters} >= OPTIONS


def test_the_json_value_of_a_task_has_its_fields() -> None:
    task = DelayedTask(1, "tag", "null", datetime(2030, 1, 31, tzinfo=timezone.utc))
    names = {field.name.removesuffix("_json") for field in fields(DelayedTask)} - HIDDEN
    shown = {"ip": "ip_address", "late_by": "late_start"}
    assert set(task.as_json()) == {shown.get(name, name) for name in names}


# -- ids ------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(world: World) -> ManualClock:
    """The clock of a world, which stands still in 2089."""
    clock = ManualClock(datetime(2089, 1, 31, tzinfo=timezone.utc))
    world.set_clock(clock)
    return clock


def test_ids_grow_with_time_and_have_63_bits(world: World, stopped: ManualClock) -> None:
    first = world.delays.new_id()
    stopped.advance(0.001)
    assert 2**62 < first < world.delays.new_id() < 2**63
    task = world.schedule(id=first, delay=60)
    assert world.delays.get(str(first)).id == task.id == first


def test_ids_of_one_millisecond_differ_in_all_threads(world: World, stopped: ManualClock) -> None:
    start = threading.Barrier(8)

    def some(_: int) -> list[int]:
        start.wait()
        return [world.delays.new_id() for _ in range(500)]

    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):  # The first ids of each maker must differ, too.
            world.set_clock(stopped)
            assert len({id for made in pool.map(some, range(8)) for id in made}) == 4000


def test_a_forked_child_makes_other_ids_than_its_parent(world: World, stopped: ManualClock) -> None:
    world.delays.new_id()
    starts = mmap.mmap(-1, 4 * 8)
    for at in range(0, 32, 8):
        assert in_child(lambda at=at: struct.pack_into("q", starts, at, world.delays.new_id()))  # type: ignore[misc]
    # Each starts at a random value below 131,072. Two starts are equal once in 13,000 runs, and all
    # of them are equal once in 10^20 runs.
    assert len({world.delays.new_id(), *struct.unpack("4q", starts)}) > 1


def test_the_contracts_statuses_keep_their_numbers() -> None:
    numbers = {"NOT_COMPLETE": 0, "DONE": 1, "FAILED": 2, "RUNNING": 3, "CANCELLED": 4, "HELD": 5}
    assert {status.name: status.value for status in Status} == numbers
    assert f"{Status.DONE} {Status.DONE!s} {Status.DONE:d}" == "DONE DONE 1"
