"""`RedisWorker`, the main process of a worker that takes its entries from a Redis."""

from __future__ import annotations

import secrets
from typing import Any
from unittest.mock import Mock

from delaytasks.model.clock import monotonic
from delaytasks.model.task import Entry
from tests.waiting import wait_until
from tests.world.main_process import MainProcess


class RedisWorker(MainProcess):
    """The main process of a worker, and the timer of another process that arms entries."""

    def __init__(self, make_world: Any, url: str) -> None:
        settings: dict[str, Any] = {
            "namespace": "t" + secrets.token_hex(4), "_grace_s": 60, "sweep": 60,
            "horizon": 200, "_self_sweep_s": 120, "_publish_limit_s": 2,
        }  # fmt: skip
        world = make_world(timer=url, **settings)
        world.runtime.timer = world.runtime.redis_timer
        self.timer: Any = make_world(timer=url, **settings).runtime.redis_timer
        super().__init__(world, is_stepped=False)
        #: Is called when the worker lets the sweep arm all near rows again.
        self.arms_again = self.runtime.sweep_loop.arm_again = Mock()  # type: ignore[method-assign]
        #: When the worker has read Redis.
        self.reads: list[float] = []
        take = world.runtime.redis_timer.take

        def take_and_note(*arguments: Any) -> Any:
            self.reads.append(monotonic())
            return take(*arguments)

        world.runtime.redis_timer.take = take_and_note

    def start(self) -> None:
        self.runtime.start()
        wait_until(lambda: self.arms_again.called, 10, "the first read of all slots")

    def arm(self, ids: range, in_s: float = 0, **fields: Any) -> None:
        due = self.clock.now_us() + int(in_s * 1e6)
        assert self.timer.arm([Entry(id, 0, due, **fields) for id in ids])

    def publish(self, text: Any) -> int:
        """Publish what listeners of the default queue get, and return their number."""
        number: int = self.timer.link.connect().publish(self.timer.channel("default"), text)
        return number

    @property
    def slot_name(self) -> str:
        name: str = self.timer.slots("default")[0].name
        return name

    def lose_slots(self) -> None:
        for slot in self.timer.slots("default"):
            self.timer.link.connect().delete(*self.timer.keys(slot))

    def stop_after_passing_on(self, ids: range) -> None:
        """Stop the worker when it has passed entries on and not deleted them yet."""
        poller: Any = self.runtime.poller
        poller._poll_loop.stop()
        self.arm(ids)
        poller._passed_on = self.timer.take(dict.fromkeys(self.timer.slots("default"), 10)) or []
        assert self.left()[1]
        self.runtime.stop()

    def here(self) -> int:
        """Return how many entries this worker has received and not passed on."""
        return self.dispatcher.waiting + sum(self.sizes())

    def left(self) -> tuple[int, int]:
        """Return how many entries wait in Redis, and how many are in transit."""
        counts: dict[str, tuple[int, int]] = self.timer.counts(["default"])
        return counts["default"]

    def end_all(self, count: int) -> list[int]:
        """End one chunk after another until `count` rows have run."""
        ran: list[int] = []

        def all_ran() -> bool:
            if self.pool.requests:
                ran.extend(entry.id for entry in self.end(self.sizes()[0], 0.001).entries)
            return len(ran) == count

        wait_until(all_ran, 10, "all of them to come")
        return ran

    def close(self) -> None:
        self.runtime.stop()
        super().close()
        client = self.timer.link.connect()
        for key in client.scan_iter(f"*{self.world.delays.settings.namespace}*", count=1000):
            client.delete(key)
        self.timer.link.close()
