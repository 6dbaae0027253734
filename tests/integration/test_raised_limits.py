"""Workers use a raised limit within seconds, and do not wait until running rows end."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from delaytasks import Status
from tests.integration.conftest import Deploy
from tests.running import Deployment
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow

#: Rows run longer than the test, so that none ends and passes its slot on.
LONG_S = 600
#: These intervals are longer than the tests, so no sweep takes part.
NO_SWEEP: dict[str, Any] = {"sweep": 60, "_self_sweep_s": 120, "horizon": 120, "_grace_s": 30}
USED_S = 2.0


@pytest.fixture
def deploy(deploy: Deploy) -> Deploy:
    return partial(deploy, **NO_SWEEP)


def begun(d: Deployment) -> int:
    return sum(run[1] == "began" for run in d.runs())


@pytest.mark.parametrize(
    ("database", "pool", "processes", "few", "many"),
    [
        ("postgresql", "threads", 60, 5, 50),
        ("mysql", "threads", 40, 5, 30),
        ("postgresql", "prefork", 8, 1, 6),
    ],
)
def test_a_raised_concurrency_is_used_while_long_rows_run(
    deploy: Deploy, database: str, pool: str, processes: int, few: int, many: int
) -> None:
    d = deploy(database)
    d.delays.policies.set(tag="test.sleep", concurrency=few)
    d.worker(pool=pool, concurrency=processes)
    tasks = [d.schedule("test.sleep", 1, body={"seconds": LONG_S}) for _ in range(3 * many)]
    wait_until(lambda: begun(d) == few, 20, lambda: f"the first ones to begin\n{d.stacks()}")
    wait_until(lambda: d.status(tasks[-1]) is Status.HELD, 20, "the others to wait in line", 0.1)
    d.delays.policies.set(tag="test.sleep", concurrency=many)
    wait_until(lambda: begun(d) >= many, USED_S + SLACK_S, lambda: f"{many} to run, not {begun(d)}")
    other = d.schedule()
    d.wait_for([other], deadline_s=10)
    assert begun(d) == many, "and no more than are allowed"


def test_a_raised_rate_is_used_while_long_rows_run(deploy: Deploy) -> None:
    d = deploy("postgresql")
    d.delays.policies.set(tag="test.sleep", rate="1/h")
    d.worker(pool="threads", concurrency=40)
    tasks = [d.schedule("test.sleep", 1, body={"seconds": LONG_S}) for _ in range(60)]
    wait_until(lambda: begun(d) == 1, 20, lambda: f"the first one to begin\n{d.stacks()}")
    wait_until(lambda: d.status(tasks[-1]) is Status.HELD, 20, "the others to wait in line", 0.1)
    d.delays.policies.set(tag="test.sleep", rate="600/m")
    wait_until(lambda: begun(d) >= 20, USED_S + 2 + SLACK_S, lambda: f"20 to run, not {begun(d)}")
