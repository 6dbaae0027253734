"""Rows of an older version are upgraded when they run, and newer ones wait for newer code."""

from __future__ import annotations

from typing import Any

import pytest

from delaytasks import BodyRefusedError, DelayedTask, DelayTasks, Status
from tests.refusals import invalid
from tests.world import World
from tests.world.recording import run_now

UPGRADES = {1: lambda body: {"order": body["nr"]}, 2: lambda body: {**body, "currency": "EUR"}}
OLD, NEW = {"nr": 7}, {"order": 7, "currency": "EUR"}


def takes(world: World, **options: Any) -> list[Any]:
    got: list[Any] = []
    world.delays.processor("pay", **options)(got.append)
    return got


def test_bodies_of_all_versions_run_as_the_newest(world: World) -> None:
    old = world.schedule("pay", OLD)
    second = world.schedule("pay", {"order": 7}, body_version=2)
    got = takes(world, body_version=3, upgrades=UPGRADES)
    new = world.schedule("pay", NEW)
    assert [world.read(task).body_version for task in (old, second, new)] == [1, 2, 3]
    world.run(old, second, new)
    assert got == [NEW, NEW, NEW]
    assert world.read(old).body == OLD, "the row keeps what was stored"


def test_batches_and_schemas_get_upgraded_bodies(world: World) -> None:
    tasks = [world.schedule("pay", OLD), world.schedule("pay", {"wrong": 1})]
    got: list[Any] = []

    @world.delays.processor("pay", body_version=3, upgrades=UPGRADES, batch=5, schema=dict)
    def work(bodies: list[Any], tasks: list[DelayedTask]) -> None:
        got.extend(bodies)

    world.run(*tasks)
    assert (got, world.statuses(tasks)) == ([NEW], ["DONE", "FAILED"])
    assert "KeyError" in str(world.read(tasks[1]).error)


def test_a_version_without_an_upgrade_fails_without_retries(world: World) -> None:
    task = world.schedule("pay", OLD)
    got = takes(world, body_version=3, upgrades={2: UPGRADES[2]}, retries="1s 1s")
    world.run(task)
    failed = world.read(task)
    assert (failed.status, got) == (Status.FAILED, [])
    assert "has version 1" in str(failed.error)
    assert "no upgrade from 1" in str(failed.error)


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
    world.change(task, expected_time=task.expected_time)
    world.run(world.read(task))
    assert takes_new == [NEW]


WRONG: list[Any] = [({"body_version": version}, "integer from 1") for version in (0, True)]
WRONG += [({"body_version": 3, "upgrades": {1: OLD.get}}, "none from version 2")]
WRONG += [({"body_version": 3, "upgrades": {3: OLD.get, 2: OLD.get}}, "3 is not below")]
WRONG += [({"upgrades": {1: OLD.get}}, "no version: say body_version")]


@pytest.mark.parametrize(("options", "error"), WRONG)
def test_upgrades_lead_to_the_version(world: World, options: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        world.delays.processor("pay", **options)


def test_scheduling_checks_the_body_in_its_version(delays: DelayTasks) -> None:
    def schema(body: dict[str, Any]) -> dict[str, Any]:
        assert "currency" in body
        return body

    delays.processor("pay", body_version=3, upgrades=UPGRADES, schema=schema)(lambda body: None)
    assert delays.schedule_delay("pay", NEW, 60).body_version == 3
    assert delays.schedule_delay("pay", OLD, 60, body_version=1).body_version == 1
    assert delays.schedule_delay("pay", "any", 60, body_version=4).body_version == 4
    with pytest.raises(BodyRefusedError):
        delays.schedule_delay("pay", OLD, 60)
    for version in (0, "2", True, 1.0):
        with invalid("body_version", match="version of a body"):
            delays.schedule_delay("pay", NEW, 60, body_version=version)


def test_check_reports_bodies_that_cannot_be_upgraded(delays: DelayTasks) -> None:
    cases: list[Any] = [("first", OLD, 1), ("second", {"order": 7}, 2), ("odd", {"order": None}, 2)]
    cases += [("newest", NEW, 3), ("newer", NEW, 4)]
    ids = {name: delays.schedule_delay("pay", b, 60, body_version=v).id for name, b, v in cases}

    def fail(body: Any) -> Any:
        raise LookupError("no such order")

    upgrade = lambda body: body if body["order"] else fail(body)  # noqa: E731
    delays.processor("pay", body_version=3, upgrades={2: upgrade})(lambda body: None)
    [finding] = delays.check()
    assert set(finding.ids) == {ids["first"], ids["odd"], ids["newer"]}
    assert finding.problem.startswith("the body of a task of tag 'pay' has version 1")
    waits = delays.get(ids["second"])
    assert run_now(delays, waits).status is Status.DONE
