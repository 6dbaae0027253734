"""The schedules that code declares, and how the table follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from delaytasks import DelayTasks
from delaytasks.core.errors import ConfigError, InvalidScheduleError, InvalidTimingError
from delaytasks.storage.store import Store
from tests.conformance.recurring.recurring_harness import RecurringHarness

Make = Callable[[], DelayTasks]


@pytest.fixture
def process(store: Store, database_url: str) -> Iterator[Make]:
    """Return a new process without declarations."""
    made: list[RecurringHarness] = []

    def make() -> DelayTasks:
        made.append(RecurringHarness(database_url, store))
        return made[-1].delays

    yield make
    for harness in made:
        harness.close()


def declare(delays: DelayTasks, *arguments: Any, tag: str = "report", **options: Any) -> None:
    @delays.recurring(*arguments, **options)
    @delays.processor(tag)
    def report(body: Any) -> None: ...


def celery_task(delays: DelayTasks) -> Any:
    """Return a Celery task of an app that is not finalized."""

    def poll(number: int) -> None: ...

    return delays._celery.task(name="shop.poll", shared=False)(poll)


def names(delays: DelayTasks) -> list[str]:
    return [schedule.name for schedule in delays.recurring.list()]


def test_a_declaration_is_stored_under_its_tag(process: Make) -> None:
    delays = process()
    declare(delays, "0 9 * * *", tz="Asia/Tokyo", body={"n": 1})
    delays.recurring.follow_code()
    found = delays.recurring.get("report")
    assert (found.tag, found.timing, found.tz, found.body, found.is_declared) == (
        "report",
        "0 9 * * *",
        "Asia/Tokyo",
        {"n": 1},
        True,
    )


def test_following_the_code_again_changes_nothing(process: Make) -> None:
    delays = process()
    declare(delays, every="5m")
    delays.recurring.follow_code()
    before = delays.recurring.get("report")
    delays.recurring.follow_code()
    assert delays.recurring.get("report") == before


def test_a_changed_declaration_replaces_the_stored_one_and_keeps_a_pause(process: Make) -> None:
    old, new = process(), process()
    declare(old, every="5m")
    old.recurring.follow_code()
    old.recurring.pause("report")
    declare(new, every="10m")
    new.recurring.follow_code()
    found = new.recurring.get("report")
    assert (found.timing, found.is_paused) == ("every 600", True)


def test_a_declaration_that_the_code_no_longer_has_is_removed(process: Make) -> None:
    old, new = process(), process()
    declare(old, every="5m")
    old.recurring.follow_code()
    new.processor("report")(lambda body: None)
    new.recurring.follow_code()
    assert names(new) == []


def test_a_process_without_the_processor_removes_nothing(process: Make) -> None:
    owner, other = process(), process()
    declare(owner, every="5m")
    owner.recurring.follow_code()
    declare(other, every="5m", tag="invoice")
    other.recurring.follow_code()
    assert names(other) == ["invoice", "report"]


def test_a_stored_schedule_is_not_removed_because_no_code_declares_it(process: Make) -> None:
    delays = process()
    delays.processor("report")(lambda body: None)
    delays.recurring.set("dynamic", "report", every="5m")
    delays.recurring.follow_code()
    assert names(delays) == ["dynamic"]


def test_a_call_cannot_change_what_code_declares(process: Make) -> None:
    delays = process()
    declare(delays, every="5m")
    delays.recurring.follow_code()
    with pytest.raises(InvalidScheduleError, match="declared in code"):
        delays.recurring.set("report", "report", every="1m")


def test_a_declaration_takes_over_a_stored_schedule(process: Make) -> None:
    delays = process()
    delays.recurring.set("report", "report", every="5m")
    declare(delays, every="5m")
    delays.recurring.follow_code()
    assert delays.recurring.get("report").is_declared


def test_one_processor_may_have_several_declarations_with_names(process: Make) -> None:
    delays = process()

    @delays.recurring("0 9 * * *", name="morning", body="am")
    @delays.recurring("0 18 * * *", name="evening", body="pm")
    @delays.processor("report")
    def report(body: Any) -> None: ...

    delays.recurring.follow_code()
    assert names(delays) == ["evening", "morning"]


def test_two_declarations_cannot_have_one_name(process: Make) -> None:
    delays = process()
    declare(delays, every="5m")
    declare(delays, every="6m", tag="other", name="report")
    with pytest.raises(ConfigError, match="declares the recurring schedule 'report' twice"):
        delays.recurring.follow_code()
    assert names(delays) == []


def test_the_declaration_of_a_celery_task_does_not_finalize_the_app(process: Make) -> None:
    delays = process()
    delays.recurring(every="5m", body={"args": [1]})(celery_task(delays))
    assert not delays._celery.finalized
    delays.recurring.follow_code()
    found = delays.recurring.get("shop.poll")
    assert found.body == {"task": "shop.poll", "args": [1]}


def test_a_process_without_a_celery_task_does_not_remove_its_schedule(process: Make) -> None:
    owner, other = process(), process()
    owner.recurring(every="5m")(celery_task(owner))
    owner.recurring.follow_code()
    other.recurring.follow_code()
    assert names(other) == ["shop.poll"]
    celery_task(other)
    other.recurring.follow_code()
    assert names(other) == []


def test_only_a_processor_can_be_declared_to_recur(process: Make) -> None:
    with pytest.raises(TypeError, match="no processor and no Celery task"):
        process().recurring(every="5m")(print)


def test_a_wrong_timing_is_an_error_where_the_code_has_it(process: Make) -> None:
    with pytest.raises(InvalidTimingError, match="Bad minute"):
        declare(process(), "61 * * * *")


def test_a_declaration_that_cannot_be_stored_stops_no_other_one(process: Make) -> None:
    delays = process()
    declare(delays, every="5m", tag="bad", body=object())
    declare(delays, every="5m", tag="good")
    delays.recurring.follow_code()
    assert names(delays) == ["good"]
    assert delays.events.counts["loop.failed"] == 1
