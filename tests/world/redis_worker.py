"""`RedisWorker`, the main process of a worker that takes its entries from a Redis."""

from __future__ import annotations

import secrets
from typing import Any
from unittest.mock import Mock

import pytest

from delaytasks import loops as loops
from delaytasks.broker import redis_timer
from delaytasks.model.clock import Clock, monotonic
from delaytasks.model.task import Entry
from tests.proxy import Proxy
from tests.waiting import wait_until
from tests.world.main_process import MainProcess


class SetBack(Clock):
    """A clock that a test sets back by `back_us`."""

    back_us = 0

    def now_us(self) -> int:
        return super().now_us() - self.back_us


class RedisWorker(MainProcess):
    """The main process of a worker, and the timer of another process that arms entries.

    `proxy` is the way of the worker to its Redis. `ahead_ms` is how long before their time entries
    are taken.
    """

    def __init__(
        self,
        make_world: Any,
        url: str,
        proxy: Proxy,
        patch: pytest.MonkeyPatch,
        ahead_ms: int | None = None,
    ) -> None:
        self._patch = patch
        if ahead_ms:
            patch.setattr(redis_timer, "AHEAD_MS", ahead_ms)
        settings: dict[str, Any] = {
            "namespace": "t" + secrets.token_hex(4), "_grace_s": 60, "sweep": 60,
            "horizon": 200, "_self_sweep_s": 120, "_publish_limit_s": 2,
        }  # fmt: skip
        world = make_world(timer=proxy.url(url), **settings)
        world.runtime.clock = SetBack()
        world.runtime.timer = world.runtime.redis_timer
        self.timer: Any = make_world(timer=url, **settings).runtime.redis_timer
        self.own_timer: Any = world.runtime.redis_timer
        super().__init__(world, is_stepped=False)
        #: Is called when the worker lets the sweep arm all near rows again.
        self.arms_again = self.runtime.sweep_loop.arm_again = Mock()  # type: ignore[method-assign]
        #: When the worker has read Redis.
        self.reads: list[float] = []
        take = self.own_timer.take

        def take_and_note(*arguments: Any) -> Any:
            self.reads.append(monotonic())
            return take(*arguments)

        self.own_timer.take = take_and_note

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

    def look_at_all(self) -> None:
        """Let the worker read all slots soon."""
        poller: Any = self.runtime.poller
        poller._read_all_soon()
        poller._poll_loop.wake()

    def count_turns(self) -> Mock:
        """Return what counts the turns of the poller from now on."""
        loop: Any = self.runtime.poller.loops[0]  # type: ignore[union-attr]
        loop._turn = Mock(wraps=loop._turn)
        turns: Mock = loop._turn
        return turns

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

    def end_chunk(self, row_s: float = 0.001) -> list[int]:
        wait_until(lambda: self.requests, 5, "a chunk")
        return [entry.id for entry in self.end(self.sizes()[0], row_s).entries]

    def end_all(self, count: int) -> list[int]:
        """End one chunk after another until `count` rows have run."""
        ran: list[int] = []

        def all_ran() -> bool:
            if self.pool.requests:
                ran.extend(self.end_chunk())
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
