"""Kill a worker's main process at the step DELAYTASKS_TEST_KILL, when it holds a burst."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from delaytasks.broker import redis_timer
from delaytasks.broker.redis_timer import RedisPoller, RedisTimer, Slot, Taken

STEP = os.environ["DELAYTASKS_TEST_KILL"]
#: The minimum number of entries in a burst.
MANY = 5
take, hand_on = RedisTimer.take, RedisPoller._pass_on


def die_if(step: str, taken: Sequence[Taken] | None) -> None:
    if step == STEP and sum(len(some.entries) for some in taken or ()) >= MANY:
        os.kill(os.getpid(), signal.SIGKILL)


def take_and_die(
    timer: RedisTimer, most: Mapping[Slot, int], handed_on: Sequence[Taken] = (), *more: Any
) -> list[Taken] | None:
    taken = take(timer, most, handed_on, *more)
    die_if("deleted", handed_on)
    die_if("taken", taken)
    return taken


def hand_on_and_die(redis_poller: RedisPoller, taken: list[Taken]) -> None:
    hand_on(redis_poller, taken)
    die_if("handed on", taken)


redis_timer.DELETE_S = 0.0  # immediately: no task of the burst may begin before the kill
RedisPoller._pass_on = hand_on_and_die  # type: ignore[method-assign, assignment]
RedisTimer.take = take_and_die  # type: ignore[method-assign, assignment]
