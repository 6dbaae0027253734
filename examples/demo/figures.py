"""Make the tables at the end: the outcome of every task, and how late the closings began."""

from __future__ import annotations

from rich.table import Table

from delaytasks import DelayedTask, Status
from examples.demo.story import Shop

#: Usual lateness is far below this value. Tasks that the sweep has to find are far above it.
HIT_MS = 100.0
#: The tolerance between two clocks. The database's clock admits a claim, but the process records
#: its begin by its own estimate of that clock. The estimate may be off by half the duration of the
#: query, which takes many milliseconds while seven processes start on two cores.
CLOCKS_MS = 50.0


def lateness_ms(task: DelayedTask) -> float:
    assert task.execution_time is not None
    return (task.execution_time - task.expected_time).total_seconds() * 1000


def is_hit(task: DelayedTask, shop: Shop) -> bool:
    """Return whether the killed worker had the task: it ran there, or waited in the worker's
    memory.
    """
    is_after = shop.killed_at is not None and task.expected_time > shop.killed_at
    return task.id in shop.interrupted or (is_after and lateness_ms(task) > HIT_MS)


def lateness_table(shop: Shop) -> Table:
    closed = [task for task in shop.orders_now if task.status is Status.DONE]
    table = Table(
        title="Lateness of closings, in milliseconds", title_justify="left", title_style="bold"
    )
    for name in ("", "tasks", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="left" if not name else "right")
    hit = [task for task in closed if is_hit(task, shop)]
    rest = [task for task in closed if not is_hit(task, shop)]
    for title, tasks in (
        ("not affected by the kill", rest),
        (f"after it, > {HIT_MS:g} ms late", hit),
    ):
        late = sorted(map(lateness_ms, tasks))
        shown = [
            f"{late[min(int(len(late) * q), len(late) - 1)]:,.1f}" if late else "-"
            for q in (0.5, 0.95, 0.99, 1)
        ]
        table.add_row(title, str(len(tasks)), *shown)
    return table


def outcome_table(shop: Shop) -> Table:
    closed = [task for task in shop.orders_now if task.status is Status.DONE]
    again = sum(task.id in shop.interrupted for task in closed)
    held = sum(is_hit(task, shop) for task in closed) - again
    table = Table(title="Outcomes", title_justify="left", title_style="bold", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("orders placed", str(len(shop.placed)), "schedule_delay(key=order)")
    table.add_row("paid in time", str(len(shop.paid)), "cancel(key=order)")
    table.add_row("closed unpaid", str(len(closed)), "at their due times")
    table.add_row(
        "payments captured", str(sum(t.status is Status.DONE for t in shop.payments_now)), ""
    )
    table.add_row(
        "payments that FAILED first",
        str(len(shop.payments)),
        f"run again by {shop.retries} calls of rerun",
    )
    table.add_row("interrupted by the kill", str(again), "lease expired, run by the other worker")
    table.add_row("waiting in the killed worker", str(held), "found in the table by the sweep")
    return table


def complaints(shop: Shop) -> list[str]:
    """Return the differences between the shop's records and the table."""
    by_id = {task.id: task for task in (*shop.orders_now, *shop.payments_now)}
    found = []
    for order, id in shop.placed.items():
        expected = Status.CANCELLED if order in shop.paid else Status.DONE
        if id not in by_id or by_id[id].status is not expected:
            found.append(
                f"order {order}: {by_id[id].status.name if id in by_id else 'lost'}, not "
                f"{expected.name}"
            )
    for order, id in shop.payments.items():
        if id not in by_id or by_id[id].status is not Status.DONE:
            found.append(
                f"payment of order {order}: {by_id[id].status.name if id in by_id else 'lost'}"
            )
    early = {
        t.id: -lateness_ms(t)
        for t in by_id.values()
        if t.status is Status.DONE and lateness_ms(t) < -CLOCKS_MS
    }
    return found + [f"order task {id} ran {ms:.0f} ms early" for id, ms in early.items()]
