"""What a test replaces when it builds the objects of a `DelayTasks`: clocks, connections, senders.

Everything else is the same in tests and in production.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from delaytasks.core.clock import Clock, Measure
from delaytasks.core.interfaces import Timer
from delaytasks.operations.callbacks import Callbacks
from delaytasks.storage.database import Database
from delaytasks.twins import InFramework
from delaytasks.wiring import ProcessorContext


class PublishesMessages(Protocol):
    """Publishes the messages of Celery tasks that waited as rows."""

    def publish(self, messages: Sequence[Any]) -> list[Exception | None]: ...
    def close(self) -> None: ...


@dataclass(frozen=True, eq=False, repr=False)
class Environment:
    """The replaceable objects. The defaults are those of production."""

    make_clock: Callable[[Measure], Clock] = Clock
    make_database: Callable[[str, int, int | None, str], Database] = Database
    #: Arms all rows; None means the timer of the settings.
    timer: Timer | None = None
    make_callbacks: Callable[..., Callbacks] = Callbacks
    #: Publishes the messages of durable Celery tasks; None means the broker.
    publisher: PublishesMessages | None = None
    #: Is entered around each call of a processor, outside the contexts of web frameworks.
    processor_contexts: Sequence[ProcessorContext] = ()
    #: Runs the calls of coroutines; None means as the web framework requires.
    in_framework: InFramework | None = None


PRODUCTION = Environment()
