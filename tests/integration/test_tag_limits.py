"""Test limits of tags on real workers.

All workers together never exceed a limit, and they use its full capacity.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from delaytasks import DelayedTask, Status
from delaytasks.runtime import runtime_of
from tests.integration.conftest import Deploy
from tests.running import Deployment, combinations
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow

#: These intervals are longer than the tests, so no sweep takes part.
NO_SWEEP: dict[str, Any] = {"sweep": 60, "_self_sweep_s": 120, "horizon": 120}


def schedule(
    d: Deployment, count: int, seconds: float = 0.05, delay: float = 2, **options: Any
) -> list[DelayedTask]:
    body = {"seconds": seconds}
    return [d.schedule("test.sleep", delay, body=body, **options) for _ in range(count)]


def most_at_once(d: Deployment) -> int:
    running = most = 0
    for run in d.runs():
        running += 1 if run[1] == "began" else -1
        most = max(most, running)
    return most


@pytest.mark.parametrize(
    ("database", "broker", "pool", "timer"),
    combinations("""postgresql-redis-threads-eta postgresql-redis-prefork-redis
        mysql-rabbitmq-threads-eta sqlite-redis-solo-eta"""),
)
def test_a_concurrency_limit_is_never_exceeded(
    deploy: Deploy, database: str, broker: str, pool: str, timer: str
) -> None:
    d = deploy(database, broker, timer=timer)
    d.delays.policies.set(tag="test.sleep", concurrency=3)
    for _ in range(2):
        d.worker(pool=pool, concurrency=4)
    tasks = schedule(d, 40)
    others = [d.schedule(delay=2) for _ in range(20)]
    d.wait_for(others, deadline_s=30)
    d.wait_for(tasks, deadline_s=60)
    assert most_at_once(d) <= 3
    assert len(d.runs()) == 2 * 40 + 20, "each of them once"


def test_one_process_with_concurrent_tasks_uses_all_slots(deploy: Deploy) -> None:
    d = deploy(**NO_SWEEP)
    d.delays.policies.set(tag="test.wait", concurrency=10)
    d.worker(pool="prefork", concurrency=1)
    tasks = [d.schedule("test.wait", 2, body={"seconds": 0.2}) for _ in range(80)]
    d.wait_for(tasks, deadline_s=20)
    assert 8 <= most_at_once(d) <= 10


@pytest.mark.quick
def test_the_next_task_starts_immediately_and_not_at_the_next_sweep(deploy: Deploy) -> None:
    d = deploy(**NO_SWEEP)
    d.delays.policies.set(tag="test.sleep", concurrency=1)
    d.worker(pool="threads", concurrency=4)
    tasks = schedule(d, 60, seconds=0.01, delay=1)
    d.wait_for(tasks, deadline_s=40)
    assert most_at_once(d) == 1


def test_another_worker_runs_the_waitlist_that_a_stopped_worker_leaves(deploy: Deploy) -> None:
    d = deploy(**NO_SWEEP)
    d.delays.policies.set(tag="test.sleep", concurrency=1)
    first = d.worker(pool="threads", concurrency=2)
    second = d.worker("-Q", d.settings["namespace"] + ".mail", pool="threads", concurrency=2)
    tasks = schedule(d, 80, seconds=0.1, delay=1)
    wait_until(lambda: len(d.runs()) > 10, 15, "some of them to run")
    runtime = runtime_of(d.delays)
    queue, control = runtime.publisher.queue("default").name, runtime.celery.control
    assert control.add_consumer(queue, destination=[d.node(1)], reply=True, timeout=10, limit=1)
    # The second worker must learn that it serves the queue. It has not found a row on the waitlist.
    time.sleep(2)
    first.terminate()
    assert any(d.status(task) is Status.HELD for task in tasks)
    assert not second.ended()
    d.wait_for(tasks, deadline_s=20)
    assert most_at_once(d) == 1


# -- a raised limit is used within seconds, and not when running rows end --------------------------


#: Rows run longer than the test, so that none ends and passes its slot on.
LONG_S = 600
ONLY_MESSAGES = {**NO_SWEEP, "_grace_s": 30}
USED_S = 2.0


@pytest.mark.parametrize(
    ("database", "pool", "processes", "few", "many"),
    [
        ("postgresql", "threads", 60, 5, 50),
        ("mysql", "threads", 40, 5, 30),
        ("postgresql", "prefork", 8, 1, 6),
        ("postgresql", "threads", 40, "1/h", "600/m"),
    ],
)
def test_a_raised_limit_is_used_while_long_rows_run(
    deploy: Deploy, database: str, pool: str, processes: int, few: Any, many: Any
) -> None:
    d, is_rate = deploy(database, **ONLY_MESSAGES), isinstance(many, str)
    limit = "rate" if is_rate else "concurrency"
    first, then = (1, 20) if is_rate else (few, many)
    d.delays.policies.set(tag="test.sleep", **{limit: few})
    d.worker(pool=pool, concurrency=processes)
    tasks = schedule(d, 3 * then, LONG_S, 1)
    wait_until(lambda: len(d.runs("began")) == first, 20, d.stacks)
    wait_until(lambda: d.status(tasks[-1]) is Status.HELD, 20, "the others to wait in line", 0.1)
    d.delays.policies.set(tag="test.sleep", **{limit: many})
    within_s = USED_S + SLACK_S + 2 * is_rate
    wait_until(lambda: len(d.runs("began")) >= then, within_s, lambda: str(len(d.runs())))
    if not is_rate:
        d.wait_for([d.schedule()], deadline_s=10)
        assert len(d.runs("began")) == many, "and no more than are allowed"
