from django.conf import settings
from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.http import require_GET, require_POST

from delaytasks import current_delays, schedule_delay
from orders.models import Order
from orders.tasks import send_receipt


@require_POST
def place(request: HttpRequest) -> JsonResponse:
    with transaction.atomic():
        order = _place(request)
    return JsonResponse({"number": order.pk, "status": order.status}, status=201)


@require_POST
def fail(request: HttpRequest) -> JsonResponse:
    """The order and its task are rolled back together."""
    with transaction.atomic():
        order = _place(request)
        raise RuntimeError(f"order {order.pk} can not be placed today")


@require_POST
def pay(request: HttpRequest, number: int) -> JsonResponse:
    with transaction.atomic():
        order = get_object_or_404(Order.objects.select_for_update(), pk=number)
        if not current_delays().cancel(tag="order.close", key=str(order.pk)):
            # The order is closed, or is being closed.
            return JsonResponse({"number": order.pk, "error": "too late to pay"}, status=409)
        order.status = "paid"
        order.save()
        send_receipt.enqueue(order.pk)
    return JsonResponse({"number": order.pk, "status": order.status})


@require_GET
def show(request: HttpRequest, number: int) -> JsonResponse:
    order = get_object_or_404(Order, pk=number)
    return JsonResponse({"number": order.pk, "status": order.status})


def _place(request: HttpRequest) -> Order:
    order = Order.objects.create(item=request.POST.get("item", "a book"))
    schedule_delay(
        "order.close", {"order": order.pk}, settings.SHOP_PAY_WITHIN_S, key=str(order.pk)
    )
    return order
