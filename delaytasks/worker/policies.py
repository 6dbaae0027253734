"""Reads a shard's policies once a second, in a thread of its own: a sweep may take longer than a pause may."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.loop import Loop
from delaytasks.engine.policies import REFRESH_S

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks
    from delaytasks.shards import Shard

STUCK_S = 10.0


def policy_loop(delays: DelayTasks, shard: Shard) -> Loop:
    cache = shard.policies

    def turn() -> float:
        cache.is_led = True
        was = cache.known.stamp
        try:
            now = cache.refresh().stamp
        except StoreUnavailableError:
            return REFRESH_S  # others tell of it
        if now != was:
            delays.events.emit("policies.read", shard=shard.number)
        return REFRESH_S

    return Loop(shard.named("policies"), turn, delays.events, STUCK_S, shard.close)
