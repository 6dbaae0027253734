from typing import Any

from flask import Blueprint, abort, current_app, request
from sqlalchemy import String, update
from sqlalchemy.orm import Mapped, mapped_column

from shop.extensions import db, delays

orders = Blueprint("orders", __name__)


class Order(db.Model):
    id: Mapped[int] = mapped_column(primary_key=True)
    item: Mapped[str] = mapped_column(String(100))
    status: Mapped[str] = mapped_column(String(10), default="placed")


@delays.processor("order.close")
def close_order(body: dict[str, Any]) -> None:
    # A task runs at least once, so a second run must find nothing left to do.
    db.session.execute(
        update(Order)
        .where(Order.id == body["order"], Order.status == "placed")
        .values(status="closed")
    )
    db.session.commit()


@orders.post("/orders")
def place() -> tuple[dict[str, Any], int]:
    order = _place()
    db.session.commit()  # the order and its task
    return {"number": order.id, "status": order.status}, 201


@orders.post("/orders/fail")
def fail() -> None:
    """The order and its task are rolled back together."""
    order = _place()
    raise RuntimeError(f"order {order.id} can not be placed today")


@orders.post("/orders/<int:number>/pay")
def pay(number: int) -> Any:
    order = db.session.get(Order, number, with_for_update=True) or abort(404)
    if not delays.cancel(
        tag="order.close", key=str(number)
    ):  # the order is closed, or is being closed
        return {"number": number, "error": "too late to pay"}, 409
    order.status = "paid"
    db.session.commit()
    return {"number": number, "status": order.status}


@orders.get("/orders/<int:number>")
def show(number: int) -> dict[str, Any]:
    order = db.session.get(Order, number) or abort(404)
    return {"number": number, "status": order.status}


def _place() -> Order:
    order = Order(item=request.form.get("item", "a book"))
    db.session.add(order)
    db.session.flush()  # gives it its number
    within_s = current_app.config["SHOP_PAY_WITHIN_S"]
    delays.schedule_delay("order.close", {"order": order.id}, within_s, key=str(order.id))
    return order
