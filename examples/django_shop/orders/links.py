"""Links of the admin's pages about tasks."""

from delaytasks import DelayTask
from orders.models import Order


def object_of(task: DelayTask) -> Order | None:
    """Return the order whose key a task has. Its page is linked, and no query is made."""
    return Order(pk=int(task.key or 0)) if task.tag == "order.close" else None
