"""A tester finds scheduled tasks and describes differences."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest

from delaytasks.testing import DelaysTester
from tests.conformance.testing_kit.conftest import KitShop


def test_a_scheduled_task_is_found_by_each_of_its_values(
    shop: KitShop, tester: DelaysTester
) -> None:
    task = shop.delays.schedule_delay(
        "order.close", {"order": 7}, "30m", key="7", queue="q", priority=3, meta={"tenant": "a"}
    )
    found = tester.assert_scheduled(
        "order.close",
        key="7",
        body={"order": mock.ANY},
        queue="q",
        priority=3,
        meta={"tenant": "a"},
        within="30m",
    )
    assert found.id == task.id
    tester.assert_scheduled("order.close", at=tester.now + timedelta(minutes=30))
    tester.assert_scheduled("order.close", within=timedelta(hours=1))
    assert [one.id for one in tester.scheduled("order.close", key="7")] == [task.id]
    assert tester.scheduled("order.close", key="8") == []


@pytest.mark.parametrize(
    ("expected", "line"),
    [
        ({"key": "8"}, "key: expected '8', got '7'"),
        ({"body": {"order": 8}}, "body['order']: expected 8, got 7"),
        ({"body": {"order": 7, "by": "me"}}, "body['by']: expected 'me', got nothing"),
        ({"body": 7}, "body: expected 7, got {'order': 7}"),
        ({"queue": "q"}, "queue: expected 'q', got 'default'"),
        ({"within": "20m"}, "due: expected within 20m, got in "),
    ],
)
def test_each_difference_is_described(
    shop: KitShop, tester: DelaysTester, expected: dict[str, object], line: str
) -> None:
    shop.delays.schedule_delay("order.close", {"order": 7}, "30m", key="7")
    with pytest.raises(AssertionError) as raised:
        tester.assert_scheduled("order.close", **expected)
    assert line in str(raised.value)


def test_the_most_similar_task_comes_first(shop: KitShop, tester: DelaysTester) -> None:
    shop.delays.schedule_delay("order.close", {"order": 1}, "10m", key="1")
    shop.delays.schedule_delay("order.close", {"order": 2}, "30m", key="2")
    with pytest.raises(AssertionError) as raised:
        tester.assert_scheduled("order.close", key="2", body={"order": 3})
    text = str(raised.value)
    assert text.index("key='2' body={'order': 2}") < text.index("key='1' body={'order': 1}")


def test_the_message_says_that_only_other_tags_are_waiting_or_nothing(
    shop: KitShop, tester: DelaysTester
) -> None:
    with pytest.raises(AssertionError, match="no task is waiting"):
        tester.assert_scheduled("order.close")
    shop.delays.schedule_delay("order.pay", 1, 60)
    with pytest.raises(AssertionError, match=r"no task of this tag is waiting; 1 task.*\n.*pay"):
        tester.assert_scheduled("order.close")


def test_a_task_that_should_not_wait_is_shown(shop: KitShop, tester: DelaysTester) -> None:
    tester.assert_not_scheduled("order.close")
    shop.delays.schedule_delay("order.close", {"order": 7}, 60, key="7")
    tester.assert_not_scheduled("order.close", key="8")
    with pytest.raises(AssertionError, match=r"key='7' body=\{'order': 7\}"):
        tester.assert_not_scheduled("order.close", key="7")
    tester.fast_forward("1m")
    tester.assert_not_scheduled("order.close")
    assert len(tester.scheduled("order.close", status="DONE")) == 1
