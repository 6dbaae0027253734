"""The simulated connection to Redis.

Commands are refused, answers are lost, entries are armed twice, notices are lost or late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from redis.exceptions import ConnectionError as DisconnectedError

from chaos.simulation.broker import DOUBLED, LATE, LATE_S, LOST
from chaos.simulation.hazards import Hazards
from chaos.simulation.redis import END, Redis
from chaos.simulation.world import Host, SimulatedWorld
from delaytasks.broker.redis_timer import _NAMES, ARM, TAKE, RedisLink, RedisLocation
from delaytasks.events import Events

#: The share of steps between two commands of a pipeline at which other actors run.
BETWEEN = 0.1
_STEPS = {_NAMES[ARM]: "ARM", _NAMES[TAKE]: "TAKE"}
Pipeline = list[tuple[Any, ...]]


class Server:
    """The Redis server that all hosts of a play share."""

    def __init__(self, world: SimulatedWorld, chance: Random, hazards: Hazards) -> None:
        self._world, self._chance, self._hazards = world, chance, hazards
        self._outside = Host("network")
        self._redis = Redis(self._publish)
        self.listeners: list[Listener] = []
        self.is_reliable = False
        self.is_up = True
        #: The number of restarts. Connections of an earlier life are broken.
        self.generation = 0

    def stop(self, is_empty: bool) -> None:
        self.is_up = False
        self.generation += 1
        self._redis.restart(is_empty)
        for listener in self.listeners:
            listener.actor.wake()

    def flush(self) -> None:
        """Delete all data, but keep the connections."""
        self._redis.sets.clear()

    def left(self, now_us: int) -> list[str]:
        """Return the members that are overdue or in preparation."""
        return [
            f"{member} in {key}"
            for key, members in self._redis.sets.items()
            for member, score in members.items()
            if member != END and (key.endswith(".prepare") or score * 1000 < now_us)
        ]

    def check(self, generation: int) -> None:
        if not self.is_up or generation != self.generation:
            raise DisconnectedError("Redis is away")

    def load(self, script: str) -> None:
        self._redis.load(script)

    def execute(self, commands: Pipeline, generation: int) -> list[Any]:
        hazards, world = self._hazards, self._world
        step = next((_STEPS.get(words[1], "ZREM") for words in commands), "")
        world.step()
        hazards.pass_by(step, "before")
        self.check(generation)
        answers = []
        for words in commands:
            answers.append(self._redis.call(*words))
            if (
                _STEPS.get(words[1]) == "ARM"
                and not self.is_reliable
                and self._chance.random() < DOUBLED
            ):
                self._later(lambda words=words: self.is_up and self._redis.call(*words))  # type: ignore[misc]
            if self._chance.random() < BETWEEN:
                world.step()
                self.check(generation)
        hazards.pass_by(step, "after")
        world.step()
        self.check(generation)
        return answers

    def _publish(self, channel: str, data: bytes) -> None:
        for listener in self.listeners:
            drawn = 1.0 if self.is_reliable else self._chance.random()
            if channel not in listener.channels or drawn < LOST:
                continue
            message = {"channel": channel.encode(), "data": data}
            if drawn < LOST + LATE:
                self._later(lambda listener=listener, message=message: listener.put(message))  # type: ignore[misc]
            else:
                listener.put(message)

    def _later(self, work: Callable[[], object]) -> None:
        delay_s = self._chance.uniform(0, LATE_S)

        def wait() -> None:
            self._world.pause(delay_s)
            work()

        self._world.start(self._outside, wait)


class Link(RedisLink):
    """The connection of one process."""

    def __init__(self, server: Server, limit_s: float, events: Events) -> None:
        super().__init__(RedisLocation(("",)), limit_s, events)
        self._server = server

    def _connect(self) -> Client:
        self._server.check(self._server.generation)
        return Client(self._server)


class Client:
    """Replaces the client of redis-py, which connects again after a loss."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def pipeline(self, transaction: bool) -> Pipe:
        assert not transaction
        return Pipe(self._server)

    def script_load(self, script: str) -> None:
        self._server.check(self._server.generation)
        self._server.load(script)

    def pubsub(self, ignore_subscribe_messages: bool) -> Listener:
        assert ignore_subscribe_messages
        return Listener(self._server)

    def close(self) -> None:
        pass


class Pipe:
    def __init__(self, server: Server) -> None:
        self._server = server
        self._commands: Pipeline = []

    def execute_command(self, *words: Any) -> None:
        self._commands.append(words)

    def zremrangebyscore(self, key: str, low: float, high: float) -> None:
        self._commands.append(("ZREMRANGEBYSCORE", key, low, high))

    def execute(self) -> list[Any]:
        if not self._commands:
            return []
        answers = self._server.execute(self._commands, self._server.generation)
        if (
            error := next((each for each in answers if isinstance(each, Exception)), None)
        ) is not None:
            raise error
        return answers


class Listener:
    """A subscription with its own connection."""

    def __init__(self, server: Server) -> None:
        self._server, self._generation = server, server.generation
        self._world = server._world
        self.actor = self._world.actor
        self.channels: tuple[str, ...] = ()
        self._messages: deque[dict[str, bytes]] = deque()

    def subscribe(self, *channels: str) -> None:
        self._world.step()
        self._server.check(self._generation)
        self.channels = channels
        self._server.listeners.append(self)

    def put(self, message: dict[str, bytes]) -> None:
        self._messages.append(message)
        self.actor.wake()

    def get_message(self, timeout: float) -> dict[str, bytes] | None:
        if not self._messages:
            self._world.rest(timeout)
        self._server.check(self._generation)
        return self._messages.popleft() if self._messages else None

    def close(self) -> None:
        if self in self._server.listeners:
            self._server.listeners.remove(self)
