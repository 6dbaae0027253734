"""`DelayTasks`: settings, database, broker and processors of one Celery app, wired together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any, TypeVar

from celery import signals

from delaytasks.bulk_verbs import BulkVerbs
from delaytasks.callback_verbs import CallbackVerbs
from delaytasks.core.encryption import names_of
from delaytasks.core.errors import (
    ConfigError,
)
from delaytasks.core.events import Events
from delaytasks.core.settings import hide_secrets
from delaytasks.core.text import shown
from delaytasks.policy_verbs import PolicyVerbs
from delaytasks.processors.registry import Registry
from delaytasks.touch_verbs import TouchVerbs
from delaytasks.webhooks.http import CALLBACK, RETRY_SCHEDULE, Callback
from delaytasks.webhooks.queue import MESSAGE, Message
from delaytasks.worker.celery_compat.beat_log import quiet_beats
from delaytasks.worker.celery_compat.celery_version import check_celery
from delaytasks.worker.celery_compat.masked_settings import mask_settings
from delaytasks.worker.celery_tasks import SWEEP, register_tasks
from delaytasks.worker.processes import Processes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.core.clock import Clock
    from delaytasks.core.interfaces import Timer
    from delaytasks.core.outcomes import Outcome
    from delaytasks.core.settings import Settings
    from delaytasks.core.task import DelayTask
    from delaytasks.execution.runner import Runner
    from delaytasks.maintenance.deploy_check import Finding
    from delaytasks.maintenance.sweeper import Sweeper
    from delaytasks.processors.registry import ProcessorOptions
    from delaytasks.scheduling.producer import Producer
    from delaytasks.scheduling.queue_routing import QueueRouting
    from delaytasks.sharding.router import ShardRouter
    from delaytasks.sharding.shard import Shard
    from delaytasks.storage.store import Store
    from delaytasks.timers.direct import DirectTimer
    from delaytasks.timers.publisher import Publisher
    from delaytasks.timers.redis import RedisTimer
    from delaytasks.webhooks.http import HttpCallbacks
    from delaytasks.webhooks.queue import QueueMessages
    from delaytasks.wiring import Wiring

F = TypeVar("F", bound=Callable[..., Any])
ENTRY_POINTS = "delaytasks.processors"


class DelayTasks(CallbackVerbs, TouchVerbs, BulkVerbs, PolicyVerbs):
    """Delayed tasks for one Celery app.

    >>> delays = DelayTasks(celery_app, database_url="postgresql://localhost/shop")
    >>> @delays.processor("order.close")
    ... def close_order(body): ...
    >>> delays.schedule_delay("order.close", {"order": 7}, 1800)

    `celery -A proj worker` then serves them, and `celery -A proj beat` sweeps.
    """

    def __init__(
        self, celery_app: Any, database_url: str | Sequence[str] | None = None, **settings: Any
    ) -> None:
        if database_url is not None:
            settings["database_url"] = database_url
        self.celery = celery_app
        self._arguments = hide_secrets(settings)
        self.registry = Registry()
        self.events = Events()
        self.ambient_transaction = lambda: None
        #: Entered around each call of a processor, the first one outermost; Flask's integration adds one.
        self.around: list[Callable[[DelayTask], AbstractContextManager[Any]]] = []
        self._lock = threading.RLock()
        self._parts: Wiring | None = None
        self.processes = Processes(self)
        self.processor(CALLBACK, retry=RETRY_SCHEDULE, schema=Callback)(self._call_back)
        self.processor(MESSAGE, retry=RETRY_SCHEDULE, schema=Message)(self._send_message)
        if celery_app is not None:
            self._attach(celery_app)

    def _attach(self, celery_app: Any) -> None:
        """Makes the Celery app serve this instance. A framework that learns of its app late calls it then."""
        check_celery()
        self.celery = celery_app
        if getattr(celery_app, "delaytasks", None) is not None:
            raise ConfigError(
                f"{celery_app!r} has delayed tasks already: one DelayTasks per Celery app"
            )
        celery_app.delaytasks = self
        register_tasks(self)
        quiet_beats()
        mask_settings()
        celery_app.steps["worker"].add("delaytasks.worker.bootsteps:DelaysStep")
        celery_app.steps["consumer"].add("delaytasks.worker.celery_compat.message_guard:GuardStep")
        celery_app.steps["consumer"].add(
            "delaytasks.worker.celery_compat.reconnecting:ReconnectStep"
        )
        celery_app.on_after_finalize.connect(self._add_to_beat, weak=False)
        if celery_app.finalized:  # and tells of it no more
            self._add_to_beat(celery_app)
        signals.import_modules.connect(self._import_entry_points, sender=celery_app, weak=False)

    # -- parts, made when they are first needed ---------------------------------------------------

    @property
    def _made(self) -> Wiring:
        if self._parts is None:
            with self._lock:
                if self._parts is None:
                    # Everything that works is behind this: a process that only registers processors does not load it.
                    from delaytasks.wiring import Wiring

                    self._parts = Wiring(
                        self.celery, self._arguments, self.registry, self.events, self.database_now
                    )
        return self._parts

    @property
    def settings(self) -> Settings:
        return self._made.settings

    @property
    def routes(self) -> ShardRouter:
        return self._made.routes

    @property
    def shards(self) -> Sequence[Shard]:
        """The databases by their numbers, each with what works on it. Mostly there is one."""
        return self.routes.shards

    @property
    def store(self) -> Store:
        """That of the first database, as is all that does not name a shard."""
        return self.shards[0].store

    @property
    def clock(self) -> Clock:
        return self.shards[0].clock

    @property
    def timer(self) -> Timer:
        return self._made.timer

    @property
    def inline_timer(self) -> Timer:
        return self._made.inline_timer

    @property
    def direct_timer(self) -> DirectTimer | None:
        return self._made.direct_timer

    @property
    def redis_timer(self) -> RedisTimer | None:
        return self._made.redis_timer

    @property
    def publisher(self) -> Publisher:
        return self._made.publisher

    @property
    def http_callbacks(self) -> HttpCallbacks:
        return self._made.http_callbacks

    @property
    def queue_messages(self) -> QueueMessages:
        return self._made.queue_messages

    @property
    def sweeper(self) -> Sweeper:
        return self.shards[0].sweeper

    @property
    def queues(self) -> QueueRouting:
        return self._made.queues

    @property
    def producer(self) -> Producer:
        return self.shards[0].producer

    # -- processors -------------------------------------------------------------------------------

    def processor(self, tag: str, **options: Unpack[ProcessorOptions]) -> Callable[[F], F]:
        """Registers the decorated function, `f(body)` or `f(body, task)`, for `tag`; a tag has one processor.

        `queue`: where its tasks go unless they name another one. `retry`: a ladder, its rungs ("15s 3m 10m"), a number
        of retries, or one of these for each exception type. `expires`: a run that would begin later than this after its
        due time is CANCELLED.
        `keep_result`: what it returns is kept, as JSON. `batch`: it is called for up to so many tasks at once,
        `f(tasks)` or `f(bodies, tasks)`. `in_flight`: so many calls run side by side in each process; it may be `async
        def`. `schema`: a dataclass, a pydantic model or a callable, which makes of the body what the processor is
        given, and refuses others. `concurrency_key`: a function that says whom a body is for, where limits are counted
        for each. `soft_time_limit`, `time_limit`: a run that takes longer gets Celery's `SoftTimeLimitExceeded`, or is
        killed; on prefork only.
        """
        return self.registry.processor(tag, **options)

    def check(self) -> Iterator[Finding]:
        """Before a deploy: tasks that wait whose tag has no processor here, or whose body its schema refuses; and rows
        that another program wrote and no worker will ever take."""
        from delaytasks.maintenance.deploy_check import check
        from delaytasks.storage.stats import Stats

        for shard in self.shards:
            stats = Stats(shard.store.database, shard.store.schema)
            strange = stats.strange(self.settings.max_delay_s, self.settings.lease_s)
            keys = names_of(self.settings.encryption_keys)
            yield from check(stats.pending(), stats.bodies, self.registry, strange, keys)

    def _call_back(self, callback: Callback, task: DelayTask) -> Outcome:
        return self.http_callbacks(callback, task)

    def _send_message(self, message: Message, task: DelayTask) -> Outcome:
        return self.queue_messages(message, task)

    # -- the worker's side ------------------------------------------------------------------------

    def runner(self, shard: int = 0, sends_events: bool = False) -> Runner:
        """What runs chunks of a shard's tasks in this process."""
        return self.processes.runner(shard, sends_events)

    def database_now(self, insists: bool) -> datetime:
        """What the clock follows; Django's integration asks on Django's own connection."""
        return self.store.tasks.now(insists)

    def own_queues(self, names: Iterable[str]) -> list[str]:
        """Our logical queues among a broker's."""
        prefix = self.settings.namespace + "."
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def check_ready(self) -> None:
        """What is wrong with the configuration is said at start, with its remedy."""
        self.check_settings()
        self._made.check_timer()
        self._made.check_databases()

    def check_settings(self) -> None:
        """As far as that can be told without asking anybody."""
        self._made.check_broker()
        houses = self.settings.houses
        for name, entry in (self.celery.conf.beat_schedule or {}).items():
            house, *_ = entry.get("args") or (0,)
            if entry.get("task") == SWEEP and not self.settings.has_house(house):
                raise ConfigError(
                    f"beat_schedule[{name!r}] sweeps house {shown(house)}, and delaytasks_houses = {houses}: "
                    f"houses are 0 to {houses - 1}; correct its args, or leave the entries to delaytasks"
                )

    def go_direct(self) -> None:
        """This process contacts neither broker nor Redis from here on, whatever its settings say: it finds near tasks
        in the table. Before anything is scheduled or run."""
        with self._lock:
            if self.settings.timer != "direct":
                self.close()
                self._parts = None
                self._arguments["timer"] = "direct"

    def close(self) -> None:
        """Sends what waits to be armed, and closes connections."""
        if self._parts is not None:
            self._parts.close()

    # -- inside -----------------------------------------------------------------------------------

    def _import_entry_points(self, **_: Any) -> None:
        """Installed packages may bring processors: `[project.entry-points."delaytasks.processors"]`."""
        for point in metadata.entry_points(group=ENTRY_POINTS):
            point.load()

    def _add_to_beat(self, sender: Any, **_: Any) -> None:
        """Beat sweeps, whatever else it does: by the entries that its schedule has for it, else by one a house."""
        schedule, settings = sender.conf.beat_schedule, self.settings
        entries = [entry for entry in schedule.values() if entry.get("task") == SWEEP]
        if not entries:
            for house in range(settings.houses):
                entry = {"task": SWEEP, "schedule": settings.sweep_s, "args": (house,)}
                schedule[f"delaytasks-sweep-{house}"] = entry
                entries.append(entry)
        queue = self.publisher.queue(settings.default_queue)
        sender.amqp.queues.add(queue)  # or Celery would declare one of its own kind by this name
        for entry in entries:
            entry["options"] = {
                "queue": queue.name,
                "expires": settings.sweep_s,
                **(entry.get("options") or {}),
            }
