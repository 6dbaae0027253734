"""Callers whose broker is unreachable, slow, or refuses messages."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from celery import Celery
from kombu import Queue
from sqlalchemy import Engine, text

from delaytasks import Status
from delaytasks.wiring import wiring_of
from tests.integration.outages.line import BROKERS, CONNECTS_S, LIMIT_S, SLACK_S, Connect, seconds
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


@BROKERS
@pytest.mark.parametrize("outage", [pytest.param("refuse", marks=pytest.mark.quick), "swallow"])
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
def test_scheduling_continues_without_the_broker(
    connect: Connect, broker: str, outage: str, is_warm: bool
) -> None:
    line = connect(broker=broker)
    delays = line.delays
    if is_warm:
        line.warm_up()
    else:
        # This call opens a connection to the database only.
        delays.schedule_delay("mail", {}, 3600)
    before = line.rows()
    getattr(line.broker, outage)()
    took = seconds(lambda: delays.schedule_delay("mail", {}, 5))
    assert took < LIMIT_S + SLACK_S
    assert line.rows() == before + 1
    if broker == "rabbitmq" and outage == "swallow" and is_warm:
        # AMQP does not confirm the publication. The message is lost, and the sweep finds the
        # overdue row.
        return
    assert not wiring_of(delays).producer_timer.is_up

    # While one thread connects, and during the pause after an attempt, other callers do not wait,
    # and no further event reports the outage.
    assert seconds(lambda: [delays.schedule_delay("mail", {}, 5) for _ in range(5)]) < LIMIT_S
    wait_until(lambda: line.count("timer.down") == 1, CONNECTS_S, "the broker to be given up")
    assert not wiring_of(delays).producer_timer.is_up
    assert line.rows() == before + 6
    assert line.count("timer.down") == 1

    line.broker.heal()
    already = line.arrived()

    def schedule() -> bool:
        delays.schedule_delay("mail", {}, 5)
        return wiring_of(delays).producer_timer.is_up

    wait_until(schedule, 5, "the timer to be up again", every_s=0.1)
    assert line.count("timer.up") == 1
    wait_until(lambda: line.arrived() > already, 5, "a message to arrive")


@BROKERS
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "cold"])
def test_a_slow_broker_makes_no_caller_wait_longer_than_the_limit(
    connect: Connect, broker: str, is_warm: bool
) -> None:
    line = connect(broker=broker)
    if is_warm:
        line.warm_up()
    else:
        line.delays.schedule_delay("mail", {}, 3600)
    # Each direction is slow, but no single step reaches the limit.
    line.broker.delay_s = 0.1
    for _ in range(3):
        assert seconds(lambda: line.delays.schedule_delay("mail", {}, 5)) < LIMIT_S + SLACK_S
    line.broker.delay_s = 0
    wait_until(lambda: line.arrived() > 0, 10, "what was sent to arrive all the same")


@BROKERS
def test_callers_in_many_threads_do_not_wait_one_by_one_for_a_silent_broker(
    connect: Connect, broker: str
) -> None:
    line = connect(broker=broker, pool_size=10)
    line.delays.schedule_delay("mail", {}, 3600)
    line.broker.swallow()
    with ThreadPoolExecutor(8) as pool:
        times = list(
            pool.map(
                lambda _: seconds(lambda: line.delays.schedule_delay("mail", {}, 5)), range(16)
            )
        )
    assert max(times) < LIMIT_S + SLACK_S
    assert line.broker.accepted == 1, "one finds out, and the others hear of it"
    assert line.rows() == 17


@BROKERS
def test_a_connection_that_was_reset_is_replaced(connect: Connect, broker: str) -> None:
    line = connect(broker=broker)
    line.warm_up()
    line.broker.reset()

    def schedule() -> bool:
        line.delays.schedule_delay("mail", {}, 5)
        return line.arrived() > 1

    wait_until(schedule, 5, "messages to arrive again", every_s=0.2)


def test_a_message_that_the_broker_refuses_raises_no_error_for_the_caller(connect: Connect) -> None:
    line = connect(broker="rabbitmq")
    line.warm_up()
    line.broker.cut_request(b"delaytasks.run")
    task = line.delays.schedule_delay("mail", {}, 5)
    wait_until(lambda: line.broker.cut == 1, 5, "the message to be cut off on its way")
    assert line.delays.get(task).status is Status.NOT_COMPLETE


@BROKERS
def test_arming_in_the_background_never_waits(connect: Connect, broker: str) -> None:
    line = connect(broker=broker, arm="background")
    delays = line.delays
    delays.schedule_delay("mail", {}, 3600)
    line.broker.swallow()
    times = [seconds(lambda: delays.schedule_delay("mail", {}, 5)) for _ in range(10)]
    assert max(times) < LIMIT_S
    wait_until(lambda: line.count("timer.down") == 1, 5, "the thread to notice")
    line.broker.heal()

    def schedule() -> bool:
        delays.schedule_delay("mail", {}, 5)
        return wiring_of(delays).producer_timer.is_up

    wait_until(schedule, 5, "the timer to be up again", every_s=0.1)
    delays.close()
    assert line.arrived() > 0


def backend(engine: Engine) -> int:
    """Return the id of the server process of a pooled connection."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())


@BROKERS
@pytest.mark.parametrize("arm", ["inline", "background"])
def test_a_forked_child_schedules_over_its_own_connections(
    connect: Connect, broker: str, arm: str
) -> None:
    line = connect(broker=broker, arm=arm)
    line.warm_up()
    accepted = line.broker.accepted
    sessions = {
        backend(engine)
        for engine in (
            wiring_of(line.delays).store.database.auto,
            wiring_of(line.delays).store.database.tx,
        )
    }
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for engine in (
                wiring_of(line.delays).store.database.auto,
                wiring_of(line.delays).store.database.tx,
            ):
                assert backend(engine) not in sessions
            for _ in range(50):
                line.delays.schedule_delay("mail", {"from": "child"}, 5)
            line.delays.close()
            status = 0
        finally:
            os._exit(status)
    for _ in range(50):
        line.delays.schedule_delay("mail", {"from": "parent"}, 5)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tasks = list(line.delays.find(limit=1000))
    assert len({task.id for task in tasks}) == len(tasks) == 102
    assert [task.body for task in tasks].count({"from": "child"}) == 50
    assert line.broker.accepted > accepted
    assert backend(wiring_of(line.delays).store.database.auto) in sessions, (
        "the child closed what is its parent's"
    )
    # Closing sends the messages that wait in the background.
    line.delays.close()
    if arm == "inline":
        assert line.arrived() == 101
    # The parent's connections still work.
    line.delays.schedule_delay("mail", {}, 5)


def test_a_queue_of_another_kind_keeps_no_other_queue_from_its_messages(connect: Connect) -> None:
    line = connect(broker="rabbitmq")
    line.warm_up()
    before = line.arrived()
    mine = wiring_of(line.delays).publisher.queue("bad")
    with Celery(
        "other", broker=line._broker_url, set_as_current=False
    ).connection_for_write() as connection:
        other = Queue(mine.name, queue_arguments={"x-max-length": 7})(connection)
        other.queue_declare()
        try:
            line.delays.schedule_delay("mail", {}, 5, queue="bad")
            line.delays.schedule_delay("mail", {}, 5)
            wait_until(lambda: line.arrived() == before + 1, 5, "the other queue's message")
        finally:
            other.delete()
            mine.exchange(connection).delete()
    assert wiring_of(line.delays).producer_timer.is_up
    assert line.count("queue.refused") == 1
    assert line.count("timer.down") == 0
