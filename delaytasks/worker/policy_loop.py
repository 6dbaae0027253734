"""Reads a shard's policies once a second, in a thread of its own: a sweep may take longer than a pause may."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delaytasks.core.errors import StoreError, StoreUnavailableError
from delaytasks.core.loop import Loop
from delaytasks.execution.policy_cache import REFRESH_S
from delaytasks.worker.database_outages import Outages

if TYPE_CHECKING:
    from delaytasks.app import DelayTasks
    from delaytasks.sharding.shard import Shard

STUCK_S = 10.0


def policy_loop(delays: DelayTasks, shard: Shard, outages: Outages) -> Loop:
    """It asks each second, so it is the one that tells when the database goes away and comes back."""
    cache = shard.policies

    def turn() -> float:
        cache.is_led = True
        was = cache.known.stamp
        outages.asked(shard.number)
        try:
            now = cache.refresh().stamp
        except StoreUnavailableError as error:
            if error.is_locked:
                outages.up(shard.number)
            else:
                outages.down(shard.number, error)
            return REFRESH_S
        except StoreError:  # the database has answered, with a refusal
            outages.up(shard.number)
            raise
        outages.up(shard.number)
        if now != was:
            delays.events.emit("policies.read", shard=shard.number)
        return REFRESH_S

    return Loop(shard.named("policies"), turn, delays.events, STUCK_S, shard.close)
