"""A worker: the real worker runtime, and a pool whose processes have real runners."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from billiard.exceptions import WorkerLostError

from chaos.checker import Finding
from chaos.simulation.broker import Message
from chaos.simulation.stage import Play
from chaos.simulation.world import Host
from delaytasks.broker.arming import read_message
from delaytasks.limits.admission import Admission
from delaytasks.run.calls import Host as RunnerHost
from delaytasks.run.calls import WorkerMemory
from delaytasks.run.runner import FailureReason, Report, Runner
from delaytasks.worker.pool import ChunkRequest
from delaytasks.worker.worker_runtime import WorkerRuntime

CHILDREN = 2
#: The loops of a worker runtime that are simulated.
DRIVEN = frozenset({"wheel", "dispatcher", "leases", "sweep", "redis_poller", "redis_listener"})
#: The errors that a loop may report.
EXPECTED = ("StoreUnavailableError: ", "OutcomeUnknownError: ")


class Child(Host):
    """A process of the pool."""

    def __init__(self, worker: SimulatedWorker, pid: int) -> None:
        super().__init__(f"{worker.name}/{pid}")
        self.pid, self._worker, self._play = pid, worker, worker.play
        self.skew_us = worker.skew_us
        self.request: Any = None
        self.runtime = runtime = worker.play.runtime()
        claims = worker.play.claims(self.name)
        host = RunnerHost(
            claims,
            Admission(worker.play.stage.store, claims, runtime.policy_cache, runtime.events),
            runtime.registry,
            lambda call: call.end(call(call.read_argument()), None),
            may_detach=True,
            memory=worker.memory,
        )
        self._runner = Runner(runtime, host)
        self.actor = worker.play.world.start(self, self._serve)

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
            text, reason = f"{type(error).__name__}: {error}", FailureReason.of(error)
            return Report(detached=self._runner.detached, error=text, reason=reason)


class SimulatedWorker(Host):
    def __init__(self, play: Play, name: str, skew_us: int) -> None:
        super().__init__(name)
        self.play, self.skew_us = play, skew_us
        self.is_stopping = self.is_stopped = False
        self.inbox: deque[Message] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self.requests: deque[tuple[ChunkRequest, Callable[..., None], Callable[..., None]]]
        self.requests = deque()
        #: The attributes of the pool that the worker's code uses.
        self.limit = self.num_processes = CHILDREN
        self.runtime = play.runtime()
        self.runtime.events.subscribe(self._hear)
        self.memory = WorkerMemory.shared()
        processes: Any = SimpleNamespace(
            name=lambda pid: f"{self.name}/{pid}",
            queues=["default"],
            task_events=lambda: None,
            memory=self.memory,
            keeps_time_limits=True,
        )
        hub = SimpleNamespace(call_soon=self.soon)
        celery_worker = SimpleNamespace(hub=hub, pool=self, consumer=None, hostname=name)
        self.main = WorkerRuntime(self.runtime, processes, celery_worker)
        self._hub = play.world.start(self, self._serve)
        self.children = [Child(self, play.new_pid()) for _ in range(CHILDREN)]

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
        for loop in self.main.loops:
            if loop.name in DRIVEN:
                loop.start()
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
            self.main.dispatcher.receive(asked.entries)
        if asked.priorities is not None:
            self.main.dispatcher.start_drain(message.queue, asked.priorities)
        self.play.hazards.pass_by("receive", "after")

    def _hear(self, name: str, fields: dict[str, Any]) -> None:
        if name == "loop.failed" and not self.is_dead and not fields["error"].startswith(EXPECTED):
            self.play.findings.append(Finding("I8", "failed", f"{fields}"))

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
        lost = SimpleNamespace(type=WorkerLostError, exception="a process died")
        for number, child in enumerate(self.children):
            if child.is_dead:
                if child.request is not None:
                    self.soon(lambda answer=child.request[2]: answer(lost))  # type: ignore[misc]
                self.children[number] = Child(self, self.play.new_pid())

    # -- end --------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Shut down warmly: return the held entries, and let the pool processes finish their
        chunks.
        """
        self.is_stopping = True
        self.main.stop()
        while any(child.request is not None and not child.is_dead for child in self.children):
            self.play.world.pause(0.1)
        self.is_stopped = True

    def kill(self) -> None:
        """Kill the worker with its pool processes."""
        for host in self.family:
            self.play.world.kill(host)
