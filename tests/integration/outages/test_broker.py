"""Callers whose broker is unreachable, slow, or refuses messages."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from delaytasks.broker.link import CONNECT_STEP_S
from delaytasks.runtime import runtime_of
from tests.integration.outages.conftest import BROKERS, LIMIT_S, SLACK_S, Connect, seconds
from tests.running import quick
from tests.waiting import in_child, wait_until

#: Connecting in a background thread may take this many seconds.
CONNECTS_S = 2 * CONNECT_STEP_S + SLACK_S

pytestmark = pytest.mark.slow


@BROKERS
@pytest.mark.parametrize("outage", [quick("refuse"), "swallow"])
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
def test_scheduling_continues_without_the_broker(
    connect: Connect, broker: str, outage: str, is_warm: bool
) -> None:
    caller = connect(broker=broker)
    delays = caller.delays
    if is_warm:
        caller.warm_up()
    else:
        # This call opens a connection to the database only.
        delays.schedule_delay("mail", {}, 3600)
    before = caller.rows()
    getattr(caller.broker, outage)()
    took = seconds(lambda: delays.schedule_delay("mail", {}, 5))
    assert took < LIMIT_S + SLACK_S
    assert caller.rows() == before + 1
    if broker == "rabbitmq" and outage == "swallow" and is_warm:
        # AMQP does not confirm the publication. The message is lost, and the sweep finds the
        # overdue row.
        return
    assert not runtime_of(delays).producer_timer.is_up

    # While one thread connects, and during the pause after an attempt, other callers do not wait,
    # and no further event reports the outage.
    assert seconds(lambda: [delays.schedule_delay("mail", {}, 5) for _ in range(5)]) < LIMIT_S
    wait_until(lambda: caller.count("timer.down") == 1, CONNECTS_S, "the broker to be given up")
    assert not runtime_of(delays).producer_timer.is_up
    assert caller.rows() == before + 6
    assert caller.count("timer.down") == 1

    caller.broker.heal()
    already = caller.arrived()
    wait_until(caller.arms, 5, "the timer to be up again", every_s=0.1)
    assert caller.count("timer.up") == 1
    wait_until(lambda: caller.arrived() > already, 5, "a message to arrive")


def backend(engine: Engine) -> int:
    """Return the id of the server process of a pooled connection."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())


@BROKERS
def test_a_forked_child_has_its_own_connections(connect: Connect, broker: str) -> None:
    caller = connect(broker=broker)
    caller.warm_up()
    accepted, database = caller.broker.accepted, runtime_of(caller.delays).store.database
    sessions = {backend(database.auto), backend(database.tx)}

    def schedule(place: str) -> None:
        for _ in range(50):
            caller.delays.schedule_delay("mail", {"from": place}, 5)

    def work() -> None:
        assert not sessions & {backend(database.auto), backend(database.tx)}
        schedule("child")
        caller.delays.close()

    assert in_child(work, meanwhile=lambda: schedule("parent"))
    tasks = list(caller.delays.find(limit=1000))
    assert len({task.id for task in tasks}) == len(tasks) == 102
    assert [task.body for task in tasks].count({"from": "child"}) == 50
    assert caller.broker.accepted > accepted
    assert backend(database.auto) in sessions, "the child closed what is its parent's"
    assert caller.arrived() == 101
    # The parent's connections still work.
    caller.delays.schedule_delay("mail", {}, 5)
