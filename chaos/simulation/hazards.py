"""Faults at a step: the host is killed or frozen, the database refuses, or its answer is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any, Literal, NamedTuple

from redis.exceptions import ConnectionError as DisconnectedError

from chaos.history import Effect, Fault
from chaos.simulation.world import Host, SimulatedWorld
from delaytasks.model.errors import OutcomeUnknownError, StoreUnavailableError

#: The range of the freeze times.
FROZEN_S = (0.5, 20.0)
#: How long pool processes may continue with their chunks after the death of their main process.
#: Their leases are not renewed in this time.
ORPHANS_S = 30.0
#: Steps that send a statement to the database.
ASKS = frozenset(
    (
        "insert cancel reschedule touch claim claim_due claim_alone claim_recovered unclaimed "
        "settle begin_sweep due_between mark_armed levels recover forget_armed "
        "stale_sweep_partitions expire renew release exist transaction"
    ).split()
)
#: Steps that send commands to Redis, named by the first command of a pipeline.
IN_REDIS = frozenset({"ARM", "TAKE", "ZREM"})
#: Calls whose callers record the answer.
ASKED = frozenset({"insert", "cancel", "reschedule", "touch"})


Act = Literal["kill", "freeze", "fail"]


class Trap(NamedTuple):
    step: str
    side: Literal["before", "after"]
    act: Act


class Hazards:
    """One trap at a time, for the first host with faults that makes its step."""

    def __init__(self, world: SimulatedWorld, note: Callable[[Fault], None]) -> None:
        self._world = world
        self._note = note
        self.trap: Trap | None = None
        #: The database is unreachable until then.
        self.away_until_us = 0
        #: The steps that any host has made.
        self.known: set[str] = set()

    def pass_by(self, step: str, side: str) -> None:
        self.known.add(step)
        trap, host = self.trap, self._world.host
        if self._world.times.now_us < self.away_until_us and side == "before" and step in ASKS:
            raise StoreUnavailableError("the database is away")
        if trap is None or (trap.step, trap.side) != (step, side):
            return
        if host is None or not host.has_faults:
            return
        self.trap = None
        self.strike(host, trap.act, f"{side} {step}")

    def strike(self, host: Host, act: str, where: str) -> None:
        now_us = self._world.times.database_us
        frozen_s = self._world.chance.uniform(*FROZEN_S) if act == "freeze" else 0
        lasts_s = (
            ORPHANS_S
            if act == "kill" and len(host.family) > 1 and host.family[0] is host
            else frozen_s
        )
        effect: Effect = "dead" if act == "kill" else "away"
        # the processes of a worker are frozen together
        hit = host if act == "kill" else host.family[0]
        self._note(
            Fault(
                f"{act} {where}",
                host.name,
                now_us,
                now_us + int(lasts_s * 1e6),
                effect,
                leases_of(hit),
            )
        )
        if act == "kill":
            self._world.kill(host)
        elif act == "freeze":
            self._world.freeze(host, frozen_s)
            self._world.pause(0)
        elif where.split()[1] in IN_REDIS:
            raise DisconnectedError("the connection broke")
        elif where.startswith("after") and where.split()[1] in ASKED:
            raise OutcomeUnknownError("the answer is lost")
        else:
            raise StoreUnavailableError("the database is away")


def leases_of(host: Host) -> tuple[str, ...]:
    """Return the key owners that stop with the host.

    A main process renews the leases of its pool.
    """
    is_pool = host.family[0] is not host
    return (host.name,) if is_pool else (f"{host.name}/",)


class StepProxy:
    """A proxy of a part of the store. Each call is a step: other actors run before and after it.

    A call within another one, for example within a transaction, is no step of its own.
    """

    def __init__(self, part: Any, world: SimulatedWorld, hazards: Hazards) -> None:
        self._part = part
        self._world = world
        self._hazards = hazards

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._part, name)
        if not callable(found):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            actor = self._world.running
            if actor is None or actor.is_in_step:
                return found(*args, **kwargs)
            self._world.step()
            self._hazards.pass_by(name, "before")
            actor.is_in_step = True
            try:
                answer = found(*args, **kwargs)
                if isinstance(answer, GeneratorType):
                    # A cursor must not stay open while other actors write.
                    return self._each(name, list(answer))
            finally:
                actor.is_in_step = False
            self._hazards.pass_by(name, "after")
            self._world.step()
            return answer

        setattr(self, name, call)
        return call

    def _each(self, name: str, answers: list[Any]) -> Iterator[Any]:
        for answer in answers:
            yield answer
            self._hazards.pass_by(name, "after")
            self._world.step()
