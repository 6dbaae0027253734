"""A worker: the real worker runtime, and a pool whose processes have real runners."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from billiard.exceptions import WorkerLostError

from chaos.simulation.broker import Message
from chaos.simulation.recurring import recurring_stage
from chaos.simulation.stage import Play
from chaos.simulation.world import Host
from chaos.violation import Violation
from delaytasks.broker.arming import read_message
from delaytasks.broker.redis_timer import RedisTimer
from delaytasks.db.policy_rows import HeldSearch
from delaytasks.events import Events
from delaytasks.limits.admission import Admission
from delaytasks.loops import FAILED_REST_S, Loop
from delaytasks.model.policies import NO_POLICIES
from delaytasks.run.calls import Host as RunnerHost
from delaytasks.run.calls import ThreadSlots, WorkerMemory
from delaytasks.run.runner import FailureReason, Report, Runner
from delaytasks.worker.pool import ChunkRequest
from delaytasks.worker.worker_runtime import WorkerRuntime

CHILDREN = 2
#: The loops of a worker runtime that are simulated.
DRIVEN = frozenset({"wheel", "dispatcher", "leases", "sweep", "redis_poller", "redis_listener"})
#: The errors that a loop may report.
EXPECTED = ("StoreUnavailableError: ", "OutcomeUnknownError: ")


class NoHeldRows:
    """The held rows of a play without pauses."""

    def levels(self) -> list[Any]:
        return []

    def search(self) -> HeldSearch:
        held: Any = self
        return HeldSearch(held)


class Child(Host):
    """A process of the pool."""

    def __init__(self, worker: SimulatedWorker, pid: int) -> None:
        super().__init__(f"{worker.name}/{pid}")
        self.pid = pid
        self._worker = worker
        self._play = play = worker.play
        self.request: Any = None
        clock = play.clock()
        policies: Any = SimpleNamespace(known=NO_POLICIES, current=lambda: NO_POLICIES)
        runtime: Any = SimpleNamespace(
            settings=play.settings,
            clock=clock,
            timer=play.timer(clock, Events()),
            events=Events(),
            transactions=SimpleNamespace(of=None),
            policy_cache=policies,
        )
        claims = play.claims(self.name)
        admission = Admission(play.stage.store, claims, policies, Events())
        host = RunnerHost(
            claims,
            admission,
            play.registry,
            play.execute,
            thread_slots=SimulatedSlots(play),
            may_detach=True,
            memory=worker.processes.memory,
        )
        self._runner = Runner(runtime, host)
        self._runner._threads = SimulatedThreads(play, self)  # type: ignore[assignment]
        self._time_budgets = self._runner._chunks._time_budget = TimeBudgets(
            play, self, self._runner
        )  # type: ignore[assignment]
        self.skew_us = worker.skew_us
        self.actor = play.world.start(self, self._serve)

    @property
    def family(self) -> Sequence[Host]:
        return self._worker.family

    def _serve(self) -> None:
        world, worker = self._play.world, self._worker
        while True:
            while worker.requests and not worker.is_dead:
                self.request = request, callback, _ = worker.requests.popleft()
                world.step()
                report = self._run(request)
                world.step()
                self.request = None
                worker.soon(lambda done=callback, report=report: done(report))  # type: ignore[misc]
            world.rest(None)

    def _run(self, request: ChunkRequest) -> Report:
        try:
            return request.work(self._runner)()
        except Exception as error:
            return Report(
                detached=self._runner.detached,
                error=f"{type(error).__name__}: {error}",
                reason=FailureReason.of(error),
            )


class SimulatedSlots(ThreadSlots):
    """Lets other actors run while a runner waits, for example for a chunk that is being settled."""

    def __init__(self, play: Play) -> None:
        super().__init__()
        self._play = play

    def wait(self, is_so: Callable[[], bool], until: float | None = None) -> bool:
        while not is_so():
            if until is not None and self._play.times.monotonic() >= until:
                return False
            self._play.world.pause(0.001)
        return True


class TimeBudgets:
    """Replaces the thread that watches the time budgets of a process."""

    def __init__(self, play: Play, host: Host, runner: Runner) -> None:
        self._play = play
        self._expire = runner._chunks._expire
        self._open: dict[Any, float] = {}
        self._actor = play.world.start(host, self._watch)

    def open(self, chunk: Any, rest_s: float = 0.0) -> None:
        ends = self._play.times.monotonic() + self._play.settings.chunk_time_budget_s + rest_s
        self._open.setdefault(chunk, ends)
        self._actor.wake()

    def end_now(self, chunk: Any) -> None:
        self._open[chunk] = self._play.times.monotonic()
        self._actor.wake()

    def close(self, chunk: Any) -> None:
        self._open.pop(chunk, None)

    def _watch(self) -> None:
        while True:
            now = self._play.times.monotonic()
            over = [chunk for chunk, ends in self._open.items() if ends <= now]
            for chunk in over:
                if self._open.pop(chunk, None) is not None:
                    try:
                        self._expire(chunk)
                    except Exception:
                        pass  # the rows still belong to the runner
            if not over:
                self._play.world.rest(
                    min((ends - now for ends in self._open.values()), default=None)
                )


class SimulatedThreads:
    """Replaces the threads that claim ahead in a process."""

    def __init__(self, play: Play, host: Host) -> None:
        self._play = play
        self._host = host

    def submit(self, work: Callable[..., Any], *args: Any) -> SimulatedFuture:
        return SimulatedFuture(self._play, self._host, lambda: work(*args))


class SimulatedFuture:
    """The result of a call that another actor of the host makes."""

    def __init__(self, play: Play, host: Host, work: Callable[[], Any]) -> None:
        self._world = play.world
        self._work = work
        self._is_done = False
        self._result: Any = None
        self._error: Exception | None = None
        self._actor = play.world.start(host, self._run)

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:
            self._error = error
        self._is_done = True

    def exception(self) -> Exception | None:
        while not self._is_done:
            self._world.pause(0.001)
        return self._error

    def result(self) -> Any:
        if (error := self.exception()) is not None:
            raise error
        return self._result


class SimulatedWorker(Host):
    def __init__(self, play: Play, name: str, skew_us: int) -> None:
        super().__init__(name)
        self.play = play
        self.skew_us = skew_us
        self.is_stopping = self.is_stopped = False
        self.inbox: deque[Message] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self.requests: deque[
            tuple[ChunkRequest, Callable[[Report], None], Callable[[Any], None]]
        ] = deque()
        #: The attributes of the pool that the worker's code uses.
        self.limit = self.num_processes = CHILDREN
        self.clock = play.clock()
        self.events = Events()
        self.events.subscribe(self._hear)
        self.timer = play.timer(self.clock, self.events)
        self.runtime = self._make_runtime()
        for loop in self.runtime.loops:
            if loop.name in DRIVEN:
                self._drive(loop)
        self._hub = play.world.start(self, self._serve)
        self.children = [Child(self, play.new_pid()) for _ in range(CHILDREN)]

    def _make_runtime(self) -> WorkerRuntime:
        play = self.play
        processes: Any = SimpleNamespace(
            name=lambda pid: f"{self.name}/{pid}",
            queues=["default"],
            task_events=lambda: None,
            memory=WorkerMemory.shared(),
            keeps_time_limits=True,
        )
        self.processes = processes
        parts: Any = SimpleNamespace(
            settings=play.settings,
            events=self.events,
            registry=play.registry,
            clock=self.clock,
            make_recurring_tasks=recurring_stage(play, self.clock, self.timer, self.events),
            store=SimpleNamespace(
                tasks=play.tasks,
                sweeps=play.sweeps,
                leases=play.leases,
                bulk=SimpleNamespace(audit=play.audit),
                workers=play.seen,
                paused_rows=NoHeldRows(),
                close=lambda: None,
            ),
            policy_cache=SimpleNamespace(stamp=0, known=NO_POLICIES, refresh=lambda: NO_POLICIES),
            redis_timer=self.timer if isinstance(self.timer, RedisTimer) else None,
            direct_timer=None,
            timer=self.timer,
            celery=SimpleNamespace(tasks={}),
            publisher=SimpleNamespace(send=lambda *_: True),  # only asked whether it answers
        )
        hub = SimpleNamespace(call_soon=self.soon)
        return WorkerRuntime(
            parts, processes, SimpleNamespace(hub=hub, pool=self, consumer=None, hostname=self.name)
        )

    @property
    def family(self) -> Sequence[Host]:
        return [self, *self.children]

    # -- the event loop ---------------------------------------------------------------------------

    def soon(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._hub.wake()

    def deliver(self, message: Message) -> None:
        self.inbox.append(message)
        self._hub.wake()

    def _serve(self) -> None:
        world = self.play.world
        while True:
            while self.inbox:
                self._receive(self.inbox.popleft())
                world.step()
            while self._calls:
                self._calls.popleft()()
                world.step()
            world.rest(None)

    def _receive(self, message: Message) -> None:
        asked = read_message(message.read(), message.queue)
        self.play.hazards.pass_by("receive", "before")
        if asked.entries:
            self.runtime.dispatcher.receive(asked.entries)
        if asked.priorities is not None:
            self.runtime.dispatcher.start_drain(message.queue, asked.priorities)
        self.play.hazards.pass_by("receive", "after")

    def _drive(self, loop: Loop) -> None:
        world = self.play.world

        def turns() -> None:
            while loop.is_running:
                rest_s: float | None = FAILED_REST_S
                try:
                    rest_s = loop._turn()
                except Exception as error:
                    self.events.emit(
                        "loop.failed", loop=loop.name, error=f"{type(error).__name__}: {error}"
                    )
                world.rest(rest_s)

        def stop(timeout_s: float = 5.0) -> None:
            loop.is_running = False
            actor.wake()
            until_us = self.play.times.now_us + timeout_s * 1e6
            while not actor.greenlet.dead and self.play.times.now_us < until_us:
                world.pause(0.01)

        loop.is_running = True
        actor = world.start(self, turns)
        loop._wake.set = actor.wake  # type: ignore[method-assign]
        loop.stop = stop  # type: ignore[method-assign]

    def _hear(self, name: str, fields: dict[str, Any]) -> None:
        if name == "loop.failed" and not fields["error"].startswith(EXPECTED):
            self.play.violations.append((0, Violation("I8", "failed", f"{fields}")))

    # -- the pool ---------------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, list[int]]:
        return {"processes": [child.pid for child in self.children if not child.is_dead]}

    def apply_async(self, _function: Any, args: Any, callback: Any, error_callback: Any) -> object:
        self.play.hazards.pass_by("send to the pool", "before")
        self.requests.append((args[0], callback, error_callback))
        for child in self.children:
            child.actor.wake()
        self.play.hazards.pass_by("send to the pool", "after")
        return object()

    def replace_dead(self) -> None:
        """Replace dead processes, as the pool does periodically."""
        for number, child in enumerate(self.children):
            if child.is_dead:
                if child.request is not None:
                    self._lost(child.request[2])
                self.children[number] = Child(self, self.play.new_pid())

    def _lost(self, error_callback: Callable[[Any], None]) -> None:
        self.soon(
            lambda: error_callback(
                SimpleNamespace(type=WorkerLostError, exception="a process died")
            )
        )

    # -- end --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Shut down warmly: return the held entries, and let the pool processes finish their
        chunks.
        """
        self.is_stopping = True
        self.runtime.stop()
        while any(child.request is not None and not child.is_dead for child in self.children):
            self.play.world.pause(0.1)
        self.is_stopped = True

    def kill(self) -> None:
        """Kill the worker with its pool processes."""
        for host in self.family:
            self.play.world.kill(host)
