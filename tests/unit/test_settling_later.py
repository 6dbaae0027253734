"""A chunk of slow rows is settled by another thread while entries wait for its process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import pytest

from delaytasks.run.calls import WorkerMemory
from tests.unit.conftest import Gate
from tests.waiting import wait_until
from tests.world import Settlement, World


def serve(world: World, others_wait: bool = True, may_detach: bool = True) -> None:
    """Register slow processors in a process for which the main process has entries, or none."""
    memory = WorkerMemory.shared()
    memory.others_wait = others_wait
    world.worker(may_detach=may_detach, memory=memory)

    def work(task: Any) -> None:
        time.sleep(0.002)
        world.notes.append(task)

    world.delays.processor("slow")(work)
    world.delays.processor("limited")(work)
    world.delays.processor("concurrent", in_flight=2)(work)


@pytest.mark.parametrize("tag", ["slow", "concurrent"])
def test_a_chunk_reports_before_it_is_settled(world: World, gate: Gate, tag: str) -> None:
    """Only one chunk is settled later, so that a locked row delays no others."""
    serve(world)
    tasks = [world.schedule(tag) for _ in range(4)]

    def hold_first(settlements: Sequence[Settlement]) -> None:
        assert settlements[0].task.id != tasks[0].id or gate.is_open.wait(10)

    world.before_settle = hold_first
    assert [world.run(task).ran for task in tasks] == [1] * 4
    assert world.statuses(tasks) == ["RUNNING", "DONE", "DONE", "DONE"]
    gate.is_open.set()
    wait_until(lambda: world.statuses(tasks) == ["DONE"] * 4, 5, "the first settlement")


def test_a_process_that_ends_awaits_the_settlement(
    world: World, gate: Gate, pool: Executor
) -> None:
    serve(world)
    world.before_settle = gate
    world.run(task := world.schedule("slow"))
    finished = pool.submit(world.worker().finish)
    gate.wait_for(1)
    assert not finished.done()
    gate.is_open.set()
    finished.result(5)
    assert world.statuses([task]) == ["DONE"]


def test_a_recovered_row_which_may_kill_the_process_awaits_the_settlement(world: World) -> None:
    serve(world)
    other, seen = world.schedule("slow"), list[list[str]]()
    world.delays.processor("poison")(lambda _: seen.append(world.statuses([other])))
    recovered = world.schedule("poison")
    world.change(recovered, lapses=1)
    world.run(other)
    world.run(world.read(recovered))
    assert seen == [["DONE"]]


@pytest.mark.parametrize(
    ("tag", "options"),
    [
        ("limited", {}),  # its waitlist waits for a slot
        ("slow", {"may_detach": False}),
        ("slow", {"others_wait": False}),
        ("quick", {}),
    ],
)
def test_otherwise_a_chunk_is_settled_before_it_reports(
    world: World, tag: str, options: dict[str, bool]
) -> None:
    serve(world, **options)
    world.limit("limited", concurrency=1)
    world.delays.processor("quick")(lambda _: None)
    threads = list[threading.Thread]()
    world.before_settle = lambda _: threads.append(threading.current_thread())
    world.run(*(tasks := [world.schedule(tag) for _ in range(2)]))
    assert set(threads) == {threading.current_thread()}
    assert world.statuses(tasks) == ["DONE"] * 2
