"""Tests of scheduled tasks: rows are in the test's transaction, without a broker."""

from unittest import mock

from django.test import TestCase, TransactionTestCase

from delaytasks import find
from delaytasks.api import default
from delaytasks.contrib.django.models import DelayTaskRow
from delaytasks.wiring import wiring_of
from orders.delays import close_order
from orders.models import Order


class OrderTest(TestCase):
    def test_an_order_schedules_its_closing(self) -> None:
        number = self.client.post("/orders", {"item": "a pen"}).json()["number"]
        [task] = find(tag="order.close")
        assert (task.body, task.key) == ({"order": number}, str(number))

    def test_paying_cancels_it(self) -> None:
        number = self.client.post("/orders").json()["number"]
        assert self.client.post(f"/orders/{number}/pay").json()["status"] == "paid"
        assert DelayTaskRow.objects.get(tag="order.close").get_status_display() == "CANCELLED"

    def test_what_fails_schedules_nothing(self) -> None:
        self.client.raise_request_exception = False
        assert self.client.post("/orders/fail").status_code == 500
        assert not Order.objects.exists()
        assert not DelayTaskRow.objects.exists()

    def test_it_is_handed_to_the_broker_after_the_commit(self) -> None:
        with mock.patch.object(wiring_of(default()).timer, "arm") as arm:
            with self.captureOnCommitCallbacks(execute=True):
                self.client.post("/orders")
                arm.assert_not_called()
            arm.assert_called_once()

    def test_a_processor_is_a_function(self) -> None:
        order = Order.objects.create(item="a hat")
        close_order({"order": order.pk})
        order.refresh_from_db()
        assert order.status == "closed"


class CommittedOrderTest(TransactionTestCase):
    def test_an_order_is_committed_with_its_task(self) -> None:
        with mock.patch.object(wiring_of(default()).timer, "arm") as arm:
            self.client.post("/orders")
        arm.assert_called_once()
        assert len(find(tag="order.close")) == 1
