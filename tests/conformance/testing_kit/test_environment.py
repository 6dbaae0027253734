"""A tester replaces parts of an instance and restores them afterwards."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
import time_machine
from freezegun import freeze_time

from delaytasks.core.errors import ForbiddenURLError
from delaytasks.testing import DelaysTester
from tests.conformance.testing_kit.conftest import KitShop

NEW_YEAR = datetime(2031, 1, 1, tzinfo=timezone.utc)


def test_a_durable_celery_task_is_kept_instead_of_sent(shop: KitShop, tester: DelaysTester) -> None:
    @shop.celery.task(name="mail.send", shared=False)
    def send(to: str, copies: int = 1) -> None:
        raise AssertionError("only a worker runs a Celery task")

    shop.delays.apply_async(send, ("a@b.example",), {"copies": 2}, countdown=1800)
    tester.fast_forward("20m")
    assert tester.sent_tasks == []
    tester.fast_forward("20m")
    [sent] = tester.sent_tasks
    assert (sent.name, sent.args, sent.kwargs) == ("mail.send", ["a@b.example"], {"copies": 2})


def test_callbacks_and_messages_are_checked_and_kept(shop: KitShop, tester: DelaysTester) -> None:
    with pytest.raises(ForbiddenURLError):
        shop.delays.schedule_callback("http://localhost/", 1, 60)
    shop.delays.schedule_callback("https://1.1.1.1/paid", {"order": 7}, 60)
    shop.delays.schedule_message("invoices", {"order": 7}, 60)
    tester.fast_forward("2m")
    assert [sent.url for sent in tester.sent_callbacks] == ["https://1.1.1.1/paid"]
    assert [(sent.to, sent.body) for sent in tester.sent_messages] == [("invoices", {"order": 7})]


def test_time_travels_forward_and_back(shop: KitShop, tester: DelaysTester) -> None:
    tester.travel_to(NEW_YEAR)
    task = shop.delays.schedule_delay("order.close", 1, "1h")
    assert timedelta(0) <= task.due - NEW_YEAR - timedelta(hours=1) < timedelta(minutes=1)
    tester.travel_to(NEW_YEAR - timedelta(days=1))
    tester.fast_forward("1h")
    assert shop.noted == []
    tester.travel_to(NEW_YEAR + timedelta(hours=2))
    tester.run_due()
    assert shop.noted == [1]
    done = shop.delays.get(task.id)
    assert done.update_time is not None
    assert done.update_time > NEW_YEAR


def test_freezegun_sets_the_time_and_moves_with_it(shop: KitShop) -> None:
    with freeze_time(NEW_YEAR) as frozen, DelaysTester(shop.delays) as tester:
        tester.move_with(frozen)
        seen = []
        shop.delays.processor("look")(lambda body: seen.append(datetime.now(timezone.utc)))
        task = shop.delays.schedule_delay("look", 1, "1h")
        assert task.due == NEW_YEAR + timedelta(hours=1)
        tester.fast_forward("1h")
        assert seen == [NEW_YEAR + timedelta(hours=1)]
        assert tester.now == datetime.now(timezone.utc) == NEW_YEAR + timedelta(hours=1)


def test_time_machine_sets_the_time_and_moves_with_it(shop: KitShop) -> None:
    with (
        time_machine.travel(NEW_YEAR, tick=False) as traveller,
        DelaysTester(shop.delays) as tester,
    ):
        tester.move_with(traveller)
        seen = []
        shop.delays.processor("look")(lambda body: seen.append(datetime.now(timezone.utc)))
        shop.delays.schedule_delay("look", 1, "1h")
        tester.fast_forward("2h")
        assert seen == [NEW_YEAR + timedelta(hours=1)]
        assert tester.now == datetime.now(timezone.utc) == NEW_YEAR + timedelta(hours=2)


def test_the_time_of_freezegun_is_enough_without_moves(shop: KitShop) -> None:
    with DelaysTester(shop.delays) as tester:
        with freeze_time(NEW_YEAR):
            shop.delays.schedule_delay("order.close", 1, "1h")
        with freeze_time(NEW_YEAR + timedelta(hours=1)):
            tester.run_due()
    assert shop.noted == [1]


def test_the_instance_is_as_before_after_the_test(shop: KitShop) -> None:
    before = shop.delays._runtime
    with DelaysTester(shop.delays) as tester:
        tester.travel_to(NEW_YEAR)
        assert shop.delays._runtime is not before
    assert shop.delays._runtime is before
    task = shop.delays.schedule_delay("order.close", 1, "1h")
    assert task.due < NEW_YEAR
    with pytest.raises(RuntimeError, match="not started"):
        tester.run_due()


def test_clear_deletes_what_other_tests_have_committed(shop: KitShop, tester: DelaysTester) -> None:
    shop.delays.schedule_delay("order.close", 1, 0, key="7")
    shop.delays.set_policy(tag="order.close", rate="2/m")
    tester.clear()
    assert (tester.run_due(), shop.delays.policies()) == ([], [])
    shop.delays.schedule_delay("order.close", 1, 0, key="7")
