"""The verbs of the World, on every database. Each test of the core builds on them."""

from __future__ import annotations

from random import Random

import pytest

from tests.world import MOVES, World


def test_a_drain_finds_the_task_of_a_lost_message(world: World) -> None:
    lost, kept = world.schedule(body="lost", delay=5), world.schedule(body="kept", delay=5)
    world.broker.lose(lost.id)
    assert (world.broker.ids, world.deliver()) == ([kept.id], []), "it is not due yet"
    world.advance(10)
    world.deliver()
    assert world.notes == ["kept"]
    world.store.workers.report("w1", ["default"], "prefork", 2, 0, ["note"])
    assert world.sweep()
    assert not world.sweep(), "it was swept a moment before"
    world.drain()
    assert world.notes == ["kept", "lost"]
    assert world.statuses([lost, kept]) == ["DONE", "DONE"]


def test_repeated_and_reordered_messages_run_each_task_once(world: World) -> None:
    for number in range(5):
        world.schedule(body=number, delay=1)
    world.broker.repeat()
    world.broker.reorder(Random(7))
    world.advance(2)
    world.deliver()
    assert sorted(world.notes) == list(range(5))


def test_only_the_rows_of_a_silent_worker_are_recovered(world: World) -> None:
    mine, theirs = world.put(), world.put()
    [held] = world.claim(mine)
    world.claim(theirs, by="worker-2")
    world.advance(50)
    assert world.renew(by="worker-2").rows == 1
    world.advance(20)
    assert world.recover().total == 1
    assert world.statuses([mine, theirs]) == ["NOT_COMPLETE", "RUNNING"]
    assert not world.settle(held)
    assert world.die("worker-2").total == 1
    assert world.statuses([theirs]) == ["NOT_COMPLETE"]


@pytest.mark.parametrize("name", ["cancel", "reschedule", "rerun", "hold", "release", "hold_back"])
def test_a_move_leads_from_each_of_its_sources_to_its_target(world: World, name: str) -> None:
    if name in ("hold", "hold_back"):
        world.delays.policies.pause(tag="note")
    for source in MOVES[name].sources:
        made = world.put(source, runs=1)
        world.move(name, made)
        assert world.read(made).status is MOVES[name].target, source
