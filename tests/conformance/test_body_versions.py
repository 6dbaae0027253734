"""A processor sees the version of each body, and bodies of newer versions wait for newer code."""

from __future__ import annotations

from typing import Any

import pytest

from delaytasks import BodyRefusedError, DelayTasks, Status
from tests.refusals import invalid
from tests.world import World
from tests.world.recording import run_now

ANY_WRONG: list[Any] = [0, "2", True, 1.0]
OLD, NEW = {"nr": 7}, {"order": 7, "currency": "EUR"}


def takes(world: World, **options: Any) -> list[Any]:
    got: list[Any] = []
    world.delays.processor("pay", **options)(got.append)
    return got


@pytest.mark.parametrize("batch", [None, 5])
def test_a_processor_sees_the_version_of_each_body(world: World, batch: int | None) -> None:
    old, got = world.schedule("pay", OLD), list[Any]()

    @world.delays.processor("pay", body_version=3, batch=batch)
    def work(body: Any, task: Any) -> None:
        together = zip(body, task, strict=True) if batch else [(body, task)]
        got.extend((one.body_version, each) for each, one in together)

    second = world.schedule("pay", {"order": 7}, body_version=2)
    new = world.schedule("pay", NEW)
    assert [world.read(task).body_version for task in (old, second, new)] == [1, 2, 3]
    world.run(old, second, new)
    assert got == [(1, OLD), (2, {"order": 7}), (3, NEW)]


def test_a_newer_body_waits_for_newer_code(world: World) -> None:
    got = takes(world, body_version=2)
    world.run(task := world.schedule("pay", NEW, body_version=3))
    waits = world.read(task)
    assert (waits.status, waits.runs, got) == (Status.NOT_COMPLETE, 0, [])
    assert waits.due == task.due
    assert world.told("task.newer_body")
    takes_new: list[Any] = []
    world.runtime.registry._processors.clear()  # as in a process with the new code
    world.delays.processor("pay", body_version=3)(takes_new.append)
    world.change(task, expected_time=task.due)  # the next try
    world.run(world.read(task))
    assert takes_new == [NEW]


def test_scheduling_checks_a_body_unless_newer_code_runs_it(delays: DelayTasks) -> None:
    def schema(body: dict[str, Any]) -> dict[str, Any]:
        assert "currency" in body
        return body

    delays.processor("pay", body_version=3, schema=schema)(lambda body: None)
    assert delays.schedule_delay("pay", NEW, 60).body_version == 3
    assert delays.schedule_delay("pay", NEW, 60, body_version=1).body_version == 1
    assert delays.schedule_delay("pay", "any", 60, body_version=4).body_version == 4
    for version in (1, 3):
        with pytest.raises(BodyRefusedError):
            delays.schedule_delay("pay", OLD, 60, body_version=version)
    for wrong in ANY_WRONG:
        with invalid("body_version", match="integer from 1"):
            delays.processor("other", body_version=wrong)
        with invalid("body_version", match="version of a body"):
            delays.schedule_delay("pay", NEW, 60, body_version=wrong)


def test_check_reports_bodies_of_newer_versions(delays: DelayTasks) -> None:
    newest, newer = (delays.schedule_delay("pay", NEW, 60, body_version=v) for v in (3, 4))
    delays.processor("pay", body_version=3)(lambda body: None)
    [finding] = delays.check()
    assert list(finding.ids) == [newer.id]
    assert finding.problem == "bodies of version 4, and its processor has 3"
    assert run_now(delays, delays.get(newest)).status is Status.DONE
