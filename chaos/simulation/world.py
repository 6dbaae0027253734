"""The scheduler of the simulation.

Actors on hosts run one at a time, in an order and at a pace that a seed determines.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from chaos.simulation.clock import Times

T = TypeVar("T")
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
        #: The objects of production that belong to it.
        self.runtime: Any = None

    @property
    def family(self) -> Sequence[Host]:
        """The hosts that are frozen together, as by SIGSTOP to a process group."""
        return [self]


class Actor:
    """A thread of a host."""

    def __init__(self, world: SimulatedWorld, host: Host, work: Callable[[], object]) -> None:
        self.host = host
        self.wakes_us = world.times.now_us
        self.is_resting = self.is_woken = False
        #: Whether it is in the middle of a step.
        self.is_in_step = False
        self._world = world
        self._work = work
        self.greenlet: Any = greenlet(self._run, world.hub)

    def wake(self) -> None:
        """End the current rest, or skip the next one."""
        self.is_woken = True
        if self.is_resting:
            self.wakes_us = self._world.times.now_us

    def _run(self) -> None:
        try:
            self._work()
        except Dead:
            pass
        finally:
            self._world.ended(self)


class SimulatedWorld:
    #: The world of the present play.
    current: ClassVar[SimulatedWorld | None] = None

    def __init__(self, times: Times, seed: int) -> None:
        SimulatedWorld.current = self
        self.times = times
        self.chance = random.Random(seed)
        self.hub: Any = getcurrent()
        self._actors: list[Actor] = []
        #: The actors of killed hosts. They end together with the world.
        self._parked: list[Actor] = []
        #: The actor that runs.
        self.running: Actor | None = None
        times.skew_us = lambda: 0 if self.running is None else self.running.host.skew_us
        times.sleep = self.pause

    @property
    def host(self) -> Host | None:
        """The host of the running actor."""
        return None if self.running is None else self.running.host

    @property
    def actor(self) -> Actor:
        assert self.running is not None
        return self.running

    def start(self, host: Host, work: Callable[[], object]) -> Actor:
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
        actor = self.running
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
            actor = self.running = self.chance.choice(ready)
            actor.wakes_us = NEVER
            actor.greenlet.switch()
            self.running = None

    def close(self) -> None:
        """End all actors."""
        for actor in self._actors:
            actor.host.is_dead = True
        for actor in [*self._actors, *self._parked]:
            self.running = actor
            if actor.greenlet:  # it has begun
                actor.greenlet.throw(Dead)
        self.running = None


# -- what replaces `threading` for actors ---------------------------------------------------------


def _world() -> SimulatedWorld:
    assert SimulatedWorld.current is not None
    return SimulatedWorld.current


class Lock:
    def __init__(self) -> None:
        self._is_held = False

    def acquire(self, blocking: bool = True) -> bool:
        while self._is_held:
            if not blocking:
                return False
            _world().pause(0.001)
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting = list[Actor]()

    def set(self) -> None:
        self._is_set = True
        for actor in self._waiting:
            actor.wake()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        world = _world()
        until_us = NEVER if timeout is None else world.times.now_us + math.ceil(timeout * 1e6)
        while not self._is_set and world.times.now_us < until_us:
            actor = world.actor  # may be woken for another reason, too
            self._waiting.append(actor)
            try:
                world.rest(None if timeout is None else (until_us - world.times.now_us) / 1e6)
            finally:
                self._waiting.remove(actor)
        return self._is_set


class Condition(Lock):
    def __init__(self) -> None:
        super().__init__()
        self._waiting = list[Event]()

    def wait(self, timeout: float | None = None) -> bool:
        event = Event()
        self._waiting.append(event)
        self.release()
        is_notified = event.wait(timeout)
        self.acquire()
        return is_notified

    def wait_for(self, is_so: Callable[[], T], timeout: float | None = None) -> T:
        until_us = _world().times.now_us + math.ceil((timeout or 0) * 1e6)
        while not (answer := is_so()):
            left_s = (until_us - _world().times.now_us) / 1e6
            if timeout is not None and left_s <= 0:
                break
            self.wait(None if timeout is None else left_s)
        return answer

    def notify_all(self) -> None:
        for event in self._waiting:
            event.set()
        self._waiting.clear()

    notify = notify_all


class Thread:
    """A thread of the host that starts it."""

    def __init__(self, target: Callable[[], object], name: str = "", daemon: bool = True) -> None:
        self._target = target

    def start(self) -> None:
        host = _world().host
        assert host is not None
        self._actor = _world().start(host, self._target)

    def is_alive(self) -> bool:
        return not self._actor.greenlet.dead

    def join(self, timeout: float | None = None) -> None:
        until_us = NEVER if timeout is None else _world().times.now_us + timeout * 1e6
        while self.is_alive() and _world().times.now_us < until_us:
            _world().pause(0.01)


class ThreadPoolExecutor:
    """Starts a thread for each call."""

    def __init__(self, size: int, name: str) -> None: ...

    def submit(self, call: Callable[..., Any], *args: Any) -> Future:
        future = Future(call, args)
        Thread(future.run).start()
        return future


class Future:
    def __init__(self, call: Callable[..., Any], args: Sequence[Any]) -> None:
        self._call, self._args = call, args
        self._is_done = Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._call(*self._args)
        except Exception as error:
            self._error = error
        self._is_done.set()

    def exception(self) -> BaseException | None:
        self._is_done.wait()
        return self._error

    def result(self) -> Any:
        if (error := self.exception()) is not None:
            raise error
        return self._result


#: The module in which actors find these classes.
threads: Any = SimpleNamespace(
    **{**vars(threading), **{kind.__name__: kind for kind in (Lock, Event, Condition, Thread)}}
)
