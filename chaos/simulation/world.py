"""The scheduler of the simulation.

Actors on hosts run one at a time, in an order and at a pace that a seed determines.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from chaos.simulation.clock import Times

#: The distribution of the duration of a step: (probability, maximum seconds).
PACE = ((0.6, 0.0), (0.35, 0.004), (0.05, 0.15))
NEVER = 1 << 62


class Dead(BaseException):
    """Ends the actors of a killed host. Whatever they do while they unwind has no effect."""


class Host:
    """A process: it is killed or frozen as a whole, and has its own clock.

    A host that drives the play, and records the answers to its calls, has no faults.
    """

    def __init__(self, name: str, has_faults: bool = True) -> None:
        self.name = name
        self.has_faults = has_faults
        self.skew_us = 0
        self.is_dead = False
        self.frozen_until_us = 0

    @property
    def family(self) -> Sequence[Host]:
        """The hosts that are frozen together, as by SIGSTOP to a process group."""
        return [self]


class Actor:
    """A thread of a host."""

    def __init__(self, world: SimulatedWorld, host: Host, work: Callable[[], None]) -> None:
        self.host = host
        self.wakes_us = world.times.now_us
        self.is_resting = self.is_woken = False
        self._world = world
        self._work = work
        self.greenlet: Any = greenlet(self._run, world.hub)

    def wake(self) -> None:
        """End the current rest, or skip the next one."""
        self.is_woken = True
        if self.is_resting:
            self.wakes_us = self._world.times.now_us

    set = wake  # the interface of a loop's event

    def _run(self) -> None:
        try:
            self._work()
        except Dead:
            pass
        finally:
            self._world.ended(self)


class SimulatedWorld:
    def __init__(self, times: Times, seed: int) -> None:
        self.times = times
        self.chance = random.Random(seed)
        self.hub: Any = getcurrent()
        self._actors: list[Actor] = []
        #: The actors of killed hosts. They end together with the world.
        self._parked: list[Actor] = []
        self._current: Actor | None = None
        self._step_s: dict[float, float] = {}
        times.skew_us = lambda: 0 if self._current is None else self._current.host.skew_us
        times.sleep = self.pause

    @property
    def host(self) -> Host | None:
        """The host of the running actor."""
        return None if self._current is None else self._current.host

    @property
    def actor(self) -> Actor:
        assert self._current is not None
        return self._current

    def start(self, host: Host, work: Callable[[], None]) -> Actor:
        actor = Actor(self, host, work)
        self._actors.append(actor)
        return actor

    def ended(self, actor: Actor) -> None:
        for some in (self._actors, self._parked):
            if actor in some:
                some.remove(actor)

    # -- called by actors -------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Let other actors run for at least `seconds`."""
        self._rest(self.times.now_us + math.ceil(seconds * 1e6))

    def rest(self, seconds: float | None) -> None:
        """Pause, but end early when the actor is woken. None rests until then."""
        actor = self.actor
        actor.is_resting = True
        if actor.is_woken:
            seconds = 0
        self._rest(NEVER if seconds is None else self.times.now_us + math.ceil(seconds * 1e6))
        actor.is_resting = actor.is_woken = False

    def step(self) -> None:
        """Take a random short time."""
        drawn = self.chance.random()
        for share, longest in PACE:
            if drawn < share:
                self.pause(self.chance.uniform(0, longest))
                return
            drawn -= share

    def _rest(self, until_us: int) -> None:
        actor = self._current
        if actor is None:
            return
        if actor.host.is_dead:
            raise Dead
        actor.wakes_us = until_us
        self.hub.switch()
        if actor.host.is_dead:
            raise Dead

    # -- called by faults -------------------------------------------------------------------------

    def kill(self, host: Host) -> None:
        host.is_dead = True
        gone = [actor for actor in self._actors if actor.host is host]
        self._actors = [actor for actor in self._actors if actor.host is not host]
        self._parked += gone
        if self.host is host:
            raise Dead

    def freeze(self, host: Host, seconds: float) -> None:
        """Freeze the host with its family."""
        for one in host.family:
            one.frozen_until_us = self.times.now_us + math.ceil(seconds * 1e6)

    # -- scheduling -------------------------------------------------------------------------------

    def run(self, is_over: Callable[[], bool]) -> None:
        """Run actors until `is_over` returns True. Time advances only if no actor is ready."""
        while not is_over():
            now_us = self.times.now_us
            ready = [
                a for a in self._actors if a.wakes_us <= now_us and a.host.frozen_until_us <= now_us
            ]
            if not ready:
                self.times.now_us = min(
                    max(a.wakes_us, a.host.frozen_until_us) for a in self._actors
                )
                continue
            actor = self._current = self.chance.choice(ready)
            actor.wakes_us = NEVER
            actor.greenlet.switch()
            self._current = None

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors:
            actor.host.is_dead = True
        for actor in [*self._actors, *self._parked]:
            self._current = actor
            if actor.greenlet:  # it has begun
                actor.greenlet.throw(Dead)
        self._current = None


class Lock:
    """Replaces `threading.Lock` for actors."""

    world: SimulatedWorld

    def __init__(self) -> None:
        self._is_held = False

    def acquire(self, blocking: bool = True) -> bool:
        while self._is_held:
            if not blocking:
                return False
            self.world.pause(0.001)
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
