"""Processors. Web processes and workers import `delays.py` of every installed app."""

from typing import Any

from django.db import transaction

from delaytasks import processor
from orders.models import Order


@processor("order.close")
def close_order(body: dict[str, Any]) -> None:
    with transaction.atomic():
        # A task runs at least once, so a second run must find nothing left to do.
        Order.objects.filter(pk=body["order"], status="placed").update(status="closed")
