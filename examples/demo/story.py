"""The events in the shop: customers place and pay orders, a partner fails, a worker is killed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from delaytasks import DelayedTask, DelayTaskError, Status, current_delays
from delaytasks.runtime import runtime_of

ORDERS = 200
PLACING_S = 5.0
#: The range of the time in which an order must be paid. A real shop uses 30 minutes.
TIME_TO_PAY_S = (8.0, 12.0)
#: The number of orders in ten that are paid; one of them is paid through the slow partner.
PAID_OF_TEN = 4
#: One order has many items and takes 1.5 s to close. A worker is killed meanwhile.
LARGE_ORDER, LARGE = 65, 300
KILL_AT_S = 10.0
PARTNER_BACK_AT_S = 13.0
RETRY_AFTER_S = 2.0
DEADLINE_S = 40.0
LOOK_S = 0.25


@dataclass
class Shop:
    """The shop's own records, which are compared with the table at the end."""

    placed: dict[int, int] = field(default_factory=dict)  # order → task id
    paid: set[int] = field(default_factory=set)
    payments: dict[int, int] = field(default_factory=dict)
    retries: int = 0
    killed: str = ""
    killed_at: datetime | None = None
    interrupted: set[int] = field(default_factory=set)
    orders_now: list[DelayedTask] = field(default_factory=list)
    payments_now: list[DelayedTask] = field(default_factory=list)


class Story:
    def __init__(
        self, kill: Callable[[str], None], partner: Path, tell: Callable[[str], None]
    ) -> None:
        self.shop = Shop()
        self._kill = kill
        self._partner = partner
        self._tell = tell
        self._random = random.Random(20)
        self._to_place = [(PLACING_S * n / ORDERS, n) for n in range(ORDERS)]
        self._to_pay: list[tuple[float, int]] = []
        self._looked_at = -LOOK_S
        self._seen_again: set[int] = set()

    def run(self, draw: Callable[[Shop], None]) -> bool:
        """Run the story. Return True if every order ended before the deadline."""
        began = time.monotonic()
        while (now := time.monotonic() - began) < DEADLINE_S:
            self._place(now)
            self._pay(now)
            if now >= KILL_AT_S and not self.shop.killed:
                self._kill_a_worker()
            if now >= PARTNER_BACK_AT_S and not self._partner.exists():
                self._partner.touch()
                self._tell("the payment partner answers again")
            if now - self._looked_at >= LOOK_S:
                self._looked_at = now
                self._look()
                draw(self.shop)
                if self._is_over():
                    return True
            time.sleep(0.005)
        return False

    # -- customers --------------------------------------------------------------------------------

    def _place(self, now: float) -> None:
        while self._to_place and self._to_place[0][0] <= now:
            _, order = self._to_place.pop(0)
            body = {
                "order": order,
                "items": LARGE if order == LARGE_ORDER else self._random.randint(1, 6),
            }
            delay = (
                KILL_AT_S - now if order == LARGE_ORDER else self._random.uniform(*TIME_TO_PAY_S)
            )
            task = current_delays().schedule_delay("order.close", body, delay, key=f"order-{order}")
            self.shop.placed[order] = task.id
            if order % 10 < PAID_OF_TEN:
                self._to_pay.append((now + self._random.uniform(1, 6), order))
            if order == 0:
                self._tell("customers place orders; an order that is not paid in time is closed")

    def _pay(self, now: float) -> None:
        for due, order in [entry for entry in self._to_pay if entry[0] <= now]:
            self._to_pay.remove((due, order))
            try:
                if not current_delays().cancel(tag="order.close", key=f"order-{order}"):
                    continue  # the order is closed or being closed, so it is too late to pay
            except DelayTaskError:
                continue
            self.shop.paid.add(order)
            if order % 10 == 0:
                task = current_delays().schedule_delay(
                    "payment.capture", {"order": order}, 1, key=f"order-{order}"
                )
                self.shop.payments[order] = task.id
            if len(self.shop.paid) == 1:
                self._tell(f"order {order} is paid: its closing is cancelled by its key")

    # -- faults -----------------------------------------------------------------------------------

    def _kill_a_worker(self) -> None:
        running = [
            task
            for task in current_delays().find(tag="order.close", status="RUNNING")
            if task.body["items"] == LARGE
        ]
        if running:
            worker = str(running[0].worker).partition("@")[0]
            self._kill(worker)
            self.shop.killed, self.shop.killed_at = worker, runtime_of(current_delays()).clock.now()
            mine = [
                t
                for t in current_delays().find(tag="order.close", status="RUNNING")
                if str(t.worker).startswith(worker)
            ]
            self.shop.interrupted = {task.id for task in mine}
            self._tell(
                f"kill -9 of worker {worker}, while it closes order {running[0].body['order']}"
            )

    # -- observation ------------------------------------------------------------------------------

    def _look(self) -> None:
        shop = self.shop
        shop.orders_now = list(current_delays().find(tag="order.close", limit=1000))
        shop.payments_now = list(current_delays().find(tag="payment.capture", limit=1000))
        for task in shop.payments_now:
            if task.status is Status.FAILED:
                current_delays().rerun(task, RETRY_AFTER_S)
                shop.retries += 1
                if shop.retries == 1:
                    self._tell(
                        f"payment of order {task.body['order']} FAILED: "
                        f"{str(task.error).strip().splitlines()[-1]}"
                    )
                    self._tell(f"failed payments are retried every {RETRY_AFTER_S:g} s")
        for task in shop.orders_now:
            if (
                task.id in shop.interrupted
                and task.status is Status.DONE
                and task.id not in self._seen_again
            ):
                self._seen_again.add(task.id)
                where = str(task.worker).partition("@")[0]
                self._tell(
                    f"order {task.body['order']} is closed by worker {where}, at the second attempt"
                )

    def _is_over(self) -> bool:
        shop = self.shop
        return (
            bool(shop.killed)
            and not self._to_place
            and not self._to_pay
            and all(task.is_finished for task in shop.orders_now)
            and len(shop.payments) == sum(task.status is Status.DONE for task in shop.payments_now)
        )
