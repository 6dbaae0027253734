"""Tests of scheduled tasks: rows are in the test's transaction, without a broker."""

from django.test import TestCase, TransactionTestCase

from delaytasks.contrib.django.models import DelayTaskRow
from delaytasks.testing import DelaysTester
from orders.delays import close_order
from orders.models import Order


class OrderTest(TestCase):
    def setUp(self) -> None:
        self.tester = DelaysTester().start()
        self.addCleanup(self.tester.stop)

    def test_an_order_is_closed_if_it_is_not_paid(self) -> None:
        number = self.client.post("/orders", {"item": "a pen"}).json()["number"]
        self.tester.assert_scheduled(
            "order.close", key=str(number), body={"order": number}, within="2s"
        )
        self.tester.fast_forward("1m")
        assert Order.objects.get(pk=number).status == "closed"

    def test_an_order_that_is_paid_is_not_closed(self) -> None:
        number = self.client.post("/orders").json()["number"]
        assert self.client.post(f"/orders/{number}/pay").json()["status"] == "paid"
        self.tester.assert_not_scheduled("order.close")
        assert DelayTaskRow.objects.get(tag="order.close").get_status_display() == "CANCELLED"
        [run] = self.tester.fast_forward("1h")
        assert run.task.tag == "orders.tasks.send_receipt"
        assert self.client.get(f"/orders/{number}").json()["status"] == "paid"

    def test_what_fails_schedules_nothing(self) -> None:
        self.client.raise_request_exception = False
        assert self.client.post("/orders/fail").status_code == 500
        assert not Order.objects.exists()
        self.tester.assert_not_scheduled("order.close")

    def test_a_processor_is_a_function(self) -> None:
        order = Order.objects.create(item="a hat")
        close_order({"order": order.pk})
        order.refresh_from_db()
        assert order.status == "closed"


class CommittedOrderTest(TransactionTestCase):
    def setUp(self) -> None:
        self.tester = DelaysTester().start()
        self.addCleanup(self.tester.stop)
        self.tester.clear()

    def test_an_order_is_closed_if_it_is_not_paid(self) -> None:
        number = self.client.post("/orders").json()["number"]
        self.tester.assert_scheduled("order.close", key=str(number))
        self.tester.fast_forward("1m")
        assert Order.objects.get(pk=number).status == "closed"
