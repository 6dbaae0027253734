"""Tests of the testing kit inside the project `examples/django_shop`.

`test_django_shop.py` runs them with `manage.py test` on each database.
"""

from datetime import timedelta
from unittest import mock

from django.db import IntegrityError
from django.test import TestCase, override_settings
from orders.models import Order  # type: ignore[import-not-found]

from delaytasks import aschedule_delay, processor, schedule_delay
from delaytasks.contrib.django.models import DelayTaskRow
from delaytasks.testing import DelaysTester


@processor("order.name")
def name_order(body: dict[str, int]) -> None:
    """A processor whose statement fails, outside an atomic block."""
    Order.objects.create(pk=body["order"], item="twice")


@processor("order.aname")
async def aname_order(body: dict[str, int]) -> None:
    await Order.objects.filter(pk=body["order"]).aupdate(item="by a coroutine")


class TestCaseTest(TestCase):
    def setUp(self) -> None:
        self.delays = DelaysTester().start()
        self.addCleanup(self.delays.stop)

    def test_the_error_of_a_processor_reaches_the_test_and_its_transaction_continues(self) -> None:
        order = Order.objects.create(item="a hat")
        schedule_delay("order.name", {"order": order.pk}, 60)
        with self.assertRaises(IntegrityError):
            self.delays.fast_forward("1m")
        order.refresh_from_db()
        assert order.item == "a hat"
        assert len(self.delays.scheduled("order.name", status="FAILED")) == 1

    def test_rows_have_the_time_of_the_test(self) -> None:
        self.delays.travel_to(self.delays.now + timedelta(days=400))
        order = Order.objects.create(item="a hat")
        task = schedule_delay("order.close", {"order": order.pk}, 60)
        row = DelayTaskRow.objects.get(id=task.id)
        assert row.update_time > self.delays.now - timedelta(minutes=5)
        self.delays.fast_forward("1m")
        order.refresh_from_db()
        assert order.status == "closed"

    def test_settings_may_be_overridden_and_checks_do_not_run_again(self) -> None:
        self.delays.stop()
        with (
            override_settings(DELAYTASKS_LEASE="5h", MEDIA_URL="other/"),
            mock.patch("django.core.checks.run_checks") as run_checks,
            DelaysTester() as tester,
        ):
            schedule_delay("order.close", {"order": 0}, 60)
            assert len(tester.scheduled("order.close")) == 1
        assert not run_checks.called

    async def test_an_asynchronous_test_awaits_the_kit(self) -> None:
        order = await Order.objects.acreate(item="a hat")
        await aschedule_delay("order.aname", {"order": order.pk}, 60)
        await self.delays.aassert_scheduled("order.aname", within="1m")
        await self.delays.afast_forward("1m")
        await order.arefresh_from_db()
        assert order.item == "by a coroutine"
