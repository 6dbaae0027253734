"""A broker that loses, duplicates and delays messages, and a publisher that sends to it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from chaos.history import Fault, MessageRecord
from delaytasks.broker.link import OutageError, Outgoing, Results
from delaytasks.model.clock import to_us

if TYPE_CHECKING:
    from chaos.simulation.stage import Play

#: The shares of messages that are lost, delivered twice, or delayed by a long time.
LOST, DOUBLED, LATE = 0.04, 0.08, 0.04
LATE_S = 6.0
#: The share of Celery tasks that the broker does not confirm, in addition to those during an
#: outage. It gets those that are not lost.
UNCONFIRMED = 0.1


class Message(NamedTuple):
    arrives_us: int
    queue: str
    #: The serialized arguments of the task.
    args: str
    expires_us: int | None

    def read(self) -> Any:
        return json.loads(self.args)


class SimulatedBroker:
    def __init__(self, chance: random.Random, is_reliable: bool = False) -> None:
        self._chance = chance
        self.is_reliable = is_reliable
        self.messages: list[Message] = []
        self.is_up = True
        #: Called when there is a message to deliver.
        self.on_put: Callable[[], None] = lambda: None

    def put(self, message: Message) -> None:
        """Deliver, lose, duplicate or delay the message at random."""
        drawn, times = self._chance.random(), 1
        if self.is_reliable:
            drawn = 1.0
        if drawn < LOST:
            return
        if drawn < LOST + DOUBLED:
            times = 2
        for _ in range(times):
            longest_s = LATE_S if LOST + DOUBLED <= drawn < LOST + DOUBLED + LATE else 0.01
            delay_us = 0 if self.is_reliable else int(self._chance.uniform(0, longest_s) * 1e6)
            self.messages.append(message._replace(arrives_us=message.arrives_us + delay_us))
            self.on_put()

    def take(self, now_us: int) -> list[Message]:
        """Return the messages that have arrived by `now_us`."""
        here = [message for message in self.messages if message.arrives_us <= now_us]
        self.messages = [message for message in self.messages if message.arrives_us > now_us]
        return [
            message
            for message in here
            if message.expires_us is None or message.expires_us >= now_us
        ]

    @property
    def next_us(self) -> int | None:
        return min((message.arrives_us for message in self.messages), default=None)

    def flush(self) -> None:
        self.messages.clear()


class CeleryLink:
    """Replaces the links that publish Celery tasks. The broker confirms each message it gets."""

    def __init__(self, play: Play) -> None:
        self._play = play

    def publish(self, messages: Sequence[Outgoing]) -> Results:
        play, results = self._play, list[Exception | None]()
        for message in messages:
            play.hazards.pass_by("publish", "before")
            play.world.step()
            if not play.broker.is_up:
                results.append(OutageError("the broker is away"))
                continue
            id, now_us = int(message.options["headers"]["id"]), play.times.now_us
            play.history.note(MessageRecord(id, "published", now_us))
            drawn = play.chance.random()
            if drawn > LOST:
                play.history.note(MessageRecord(id, "begun", now_us))
            play.hazards.pass_by("publish", "after")
            if drawn < UNCONFIRMED:
                lost_us = play.times.database_us
                play.history.note(Fault("lost confirmation", "broker", lost_us, lost_us))
            results.append(OutageError("no answer") if drawn < UNCONFIRMED else None)
        return results


class BrokerPublisher:
    """Replaces `Publisher`."""

    def __init__(self, broker: SimulatedBroker, now_us: Any) -> None:
        self._broker = broker
        self._now_us = now_us

    @property
    def is_up(self) -> bool:
        return self._broker.is_up

    def connect(self) -> None:
        """Do nothing, since the broker is available or not at any moment."""

    def send(self, queue: str, messages: list[tuple[list[Any], Mapping[str, Any]]]) -> bool:
        if not self._broker.is_up:
            return False
        for args, options in messages:
            expires: datetime | None = options.get("expires")
            expires_us = None if expires is None else to_us(expires)
            self._broker.put(Message(self._now_us(), queue, json.dumps(args), expires_us))
        return True
