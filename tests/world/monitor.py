"""`Monitor`, which hears the events of a world's runs in place of Flower."""

from __future__ import annotations

import json
from typing import Any

from celery.events.state import State, Task

from delaytasks import DelayedTask
from delaytasks.broker.link import Outgoing
from delaytasks.worker.processes import Processes
from tests.world.world import World


class Monitor:
    """Passes the events of `worker-1` through JSON to Celery's `State`.

    It is made before the worker is used. Without `listens`, the worker sends its events to the
    broker until `listen` is called.
    """

    def __init__(self, world: World, listens: bool = True) -> None:
        self.messages: list[list[dict[str, Any]]] = []
        self.state = State()
        processes = Processes(lambda: world.runtime)
        processes.hostname = "w@test"
        self._sender: Any = processes.task_events()
        world.worker(watcher=self._sender)
        if listens:
            self.listen()

    def listen(self) -> None:
        """Take the place of the broker."""
        self._sender._link = self

    def publish(self, messages: list[Outgoing]) -> list[None]:
        """Hear the events, as a `BrokerLink` sends them."""
        for message in messages:
            events = json.loads(json.dumps(message.body))
            self.messages.append(events)
            for clock, event in enumerate(events, len(self.events())):
                self.state.event({**event, "clock": clock, "local_received": event["timestamp"]})
        return [None] * len(messages)

    def events(self) -> list[str]:
        """Return the kinds of all events."""
        return [event["type"] for events in self.messages for event in events]

    def task(self, task: DelayedTask, attempt: int = 1) -> Task:
        return self.state.tasks[f"{task.id}-{attempt}"]
