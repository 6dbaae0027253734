"""A tester runs tasks in the order of their due times."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from delaytasks import Cancel, Fail, Status
from delaytasks.core.errors import (
    BodyNotJSONError,
    DuplicateTaskError,
    TaskNotFoundError,
    UnknownTagError,
)
from delaytasks.testing import DelaysTester
from tests.conformance.testing_kit.conftest import KitShop


def test_run_due_runs_due_tasks_only(shop: KitShop, tester: DelaysTester) -> None:
    shop.delays.schedule_delay("order.close", 1, 0)
    later = shop.delays.schedule_delay("order.close", 2, 60)
    [run] = tester.run_due()
    assert (shop.noted, run.outcome, run.error) == ([1], "succeed", None)
    assert [task.id for task in tester.scheduled()] == [later.id]
    assert shop.delays.get(run.task.id).status is Status.DONE


def test_fast_forward_runs_everything_at_its_due_time_and_in_order(
    shop: KitShop, tester: DelaysTester
) -> None:
    began = tester.now
    for minutes in (20, 5, 40, 10):
        shop.delays.schedule_delay("order.close", minutes, minutes * 60, queue=f"q{minutes}")
    runs = tester.fast_forward("30m")
    assert shop.noted == [5, 10, 20]
    late = [run.at - run.task.due for run in runs]
    assert all(timedelta(0) <= one < timedelta(seconds=30) for one in late)
    assert timedelta(minutes=30) <= tester.now - began < timedelta(minutes=31)


def test_fast_forward_runs_tasks_that_processors_schedule_and_retries(
    shop: KitShop, tester: DelaysTester
) -> None:
    shop.delays.processor("chain")(
        lambda body: shop.delays.schedule_delay("order.pay", body, 60) and None
    )
    shop.errors = [ValueError("first"), ValueError("second")]
    shop.delays.schedule_delay("chain", 7, 60)
    runs = tester.fast_forward("1h")
    assert [run.outcome for run in runs] == [
        "succeed", "schedule_retry", "schedule_retry", "succeed",
    ]  # fmt: skip
    assert [str(run.error) for run in runs] == ["None", "first", "second", "None"]
    minutes = [round((run.at - runs[0].at).total_seconds() / 60) for run in runs]
    assert (minutes, shop.noted) == ([0, 1, 2, 7], [7])


def test_a_coroutine_runs_in_the_thread_of_the_test(shop: KitShop, tester: DelaysTester) -> None:
    shop.delays.schedule_delay("order.mail", 7, 0)
    tester.run_due()
    assert shop.noted == [("mail", 7)]


# -- errors ---------------------------------------------------------------------------------------


def test_the_error_of_a_processor_reaches_the_test_after_the_other_tasks_ran(
    shop: KitShop, tester: DelaysTester
) -> None:
    shop.errors = [ValueError("no money")]
    shop.delays.schedule_delay("order.bill", 1, 0)
    shop.delays.schedule_delay("order.close", 2, 0)
    with pytest.raises(ValueError, match="no money"):
        tester.run_due()
    assert shop.noted == [2]
    [failed] = tester.scheduled("order.bill", status="FAILED")
    assert "no money" in str(failed.error)


def test_an_error_is_raised_if_the_retry_is_still_to_come(
    shop: KitShop, tester: DelaysTester
) -> None:
    shop.errors = [ValueError("no money")]
    shop.delays.schedule_delay("order.pay", 1, 0)
    with pytest.raises(ValueError, match="no money"):
        tester.run_due()
    tester.assert_scheduled("order.pay", within="1m")


def test_an_error_is_not_raised_if_the_test_says_so(shop: KitShop, tester: DelaysTester) -> None:
    shop.errors = [ValueError("no money")]
    shop.delays.schedule_delay("order.bill", 1, 0)
    [run] = tester.run_due(raises=False)
    assert (run.outcome, type(run.error)) == ("fail", ValueError)


def test_outcomes_are_no_errors(shop: KitShop, tester: DelaysTester) -> None:
    outcomes: list[Any] = [Fail("as asked"), Cancel("as asked")]
    shop.delays.processor("outcome")(lambda body: outcomes.pop(0))
    for number in range(2):
        shop.delays.schedule_delay("outcome", number, number)
    assert [run.outcome for run in tester.fast_forward(5)] == ["fail", "withdraw"]


def test_the_testing_kit_refuses_calls_that_production_refuses(
    shop: KitShop, tester: DelaysTester
) -> None:
    with pytest.raises(BodyNotJSONError):
        shop.delays.schedule_delay("order.close", {1, 2}, 0)
    with pytest.raises(UnknownTagError):
        shop.delays.schedule_delay("order.clos", 1, 0)
    shop.delays.schedule_delay("order.close", 1, 60, key="7")
    with pytest.raises(DuplicateTaskError):
        shop.delays.schedule_delay("order.close", 1, 60, key="7")
    shop.delays.cancel(tag="order.close", key="7")
    with pytest.raises(TaskNotFoundError):
        shop.delays.get(tag="order.close", key="8")
    assert tester.fast_forward("2m") == []


def test_a_task_without_a_processor_is_an_error(shop: KitShop, tester: DelaysTester) -> None:
    shop.delays.processor("gone")(shop.noted.append)
    shop.delays.schedule_delay("gone", 1, 60)
    del shop.delays._registry._processors["gone"]
    another = r"tag=gone.*; if the task is of another application, give the tests a database"
    with pytest.raises(UnknownTagError, match=another):
        tester.fast_forward("1d")


def test_a_task_that_schedules_itself_again_and_again_is_an_error(
    shop: KitShop, tester: DelaysTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("delaytasks.testing.runs.MAX_RUNS", 20)
    shop.delays.processor("loop")(lambda body: shop.delays.schedule_delay("loop", 1, 0) and None)
    shop.delays.schedule_delay("loop", 1, 0)
    with pytest.raises(AssertionError, match="schedule its own task again"):
        tester.run_due()


# -- limits, pauses and schedules -----------------------------------------------------------------


@pytest.mark.slow
def test_limits_are_kept(shop: KitShop, tester: DelaysTester) -> None:
    shop.delays.set_policy(tag="order.close", rate="2/m")
    for number in range(4):
        shop.delays.schedule_delay("order.close", number, 0)
    tester.run_due()
    assert len(shop.noted) < 4
    tester.fast_forward("3m")
    assert sorted(shop.noted) == [0, 1, 2, 3]


def test_a_paused_tag_runs_after_it_is_resumed(shop: KitShop, tester: DelaysTester) -> None:
    shop.delays.pause(tag="order.close")
    shop.delays.schedule_delay("order.close", 1, 60)
    assert tester.fast_forward("1h") == []
    assert len(tester.scheduled("order.close")) == 1
    shop.delays.resume(tag="order.close")
    tester.run_due()
    assert shop.noted == [1]


def test_recurring_schedules_run_at_each_occurrence(shop: KitShop, tester: DelaysTester) -> None:
    shop.delays.recurring.set("nightly", tag="order.close", body=1, every="1h")
    runs = tester.fast_forward("1d")
    assert len(runs) == len(shop.noted) in (23, 24)
    gaps = {round((second.at - first.at).total_seconds() / 60) for first, second in pairwise(runs)}
    assert gaps == {60}


# -- inline ---------------------------------------------------------------------------------------


def test_a_task_runs_inline_whatever_its_delay(
    shop: KitShop, start: Callable[..., DelaysTester]
) -> None:
    tester = start(run_inline=True)
    began = tester.now
    shop.delays.schedule_delay("order.close", 1, "30m")
    assert shop.noted == [1]
    assert tester.now - began < timedelta(minutes=5)
    shop.errors = [ValueError("no money")]
    with pytest.raises(ValueError, match="no money"):
        shop.delays.schedule_delay("order.bill", 1, 0)
