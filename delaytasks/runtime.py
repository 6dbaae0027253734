"""The objects behind one `DelayTasks`, each of them listed once.

A part is made by its first use and kept. The packages below this module receive the `Runtime`, or a
few of its parts, and never import this module when they are loaded. A test replaces a part by
setting the attribute before the part is used.
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from delaytasks.broker.arming import BackgroundTimer, EtaTimer, Publisher, Sender, can_run_threads
from delaytasks.broker.direct import DirectTimer
from delaytasks.broker.link import ConfirmingLinks
from delaytasks.db.database import run_in_session
from delaytasks.db.migrations import url_of
from delaytasks.db.producer import CallerTransactions, Producer, QueueRouting
from delaytasks.db.store import Store
from delaytasks.loops import ThreadPool
from delaytasks.model.body import Cipher
from delaytasks.model.clock import Clock, IdMaker, fork_safe, wall_ms
from delaytasks.model.policies import PolicyCache
from delaytasks.model.task import DelayedTask, Entry
from delaytasks.settings import load_settings

if TYPE_CHECKING:
    from delaytasks.broker.redis_timer import RedisTimer
    from delaytasks.callbacks.sending import HttpCallbacks, Message
    from delaytasks.client import DelayTasks
    from delaytasks.durable_eta.messages import CeleryTasks
    from delaytasks.model.moves import Outcome
    from delaytasks.model.task import Timer
    from delaytasks.recurring.creation import RecurringTable
    from delaytasks.worker.sweep import Sweeper

T = TypeVar("T")
#: Runs the call of a coroutine as a web framework requires whose connections belong to threads or
#: requests. None means that the call may run in any thread.
InFramework = Callable[[Callable[[], Any]], Awaitable[Any] | None]
#: Is entered around each call of a processor.
ProcessorContext = Callable[[DelayedTask], AbstractContextManager[Any]]
#: The time limit for the confirmations of Celery tasks that waited as rows.
CONFIRM_LIMIT_S = 5.0


class part(cached_property[T]):
    """A `cached_property` that two threads cannot make twice."""

    if not TYPE_CHECKING:

        def __get__(self, instance: Any, owner: type[Any] | None = None) -> Any:
            if instance is None:
                return self
            # Not by the method of the class above, whose lock a fork would leave locked.
            with instance._lock:
                made, name = vars(instance), self.attrname
                return made[name] if name in made else made.setdefault(name, self.func(instance))


class Runtime:
    """Everything that one set of settings makes of a `DelayTasks`.

    Its registry and its events outlive the runtime. `changes` come on top of the settings given to
    the `DelayTasks`.
    """

    def __init__(self, delays: DelayTasks, **changes: Any) -> None:
        fork_safe(self)
        self.celery = delays._celery
        self.registry = delays._registry
        self.events = events = delays._events
        #: Reads the time of the database, for the clock; by default from the store.
        self.ask_now = delays._database_now
        #: Web frameworks enter these around each call of a processor, the first one outermost.
        self.processor_contexts = delays._processor_contexts()
        self.in_framework: InFramework = delays._in_framework
        #: How to make the tables, for messages.
        self.tables_remedy = delays._tables_remedy
        #: Returns the transaction of a call without `session=`.
        self._ambient_transaction = delays._ambient_transaction
        arguments = {**delays._arguments, **changes}
        self.settings = settings = load_settings(self.celery.conf, os.environ, **arguments)
        if settings.log_format == "json":
            from delaytasks.logging import log_structured

            events.use_log(log_structured)
        self.cipher = Cipher(settings.encryption_keys) if settings.encryption_keys else None

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    def check(self) -> None:
        """Make the parts that raise the errors of wrong settings."""
        _ = self.producer
        if self.settings.callback_allow or self.settings.callback_secrets:
            _ = self.http_callbacks

    # -- the database -----------------------------------------------------------------------------

    @part
    def store(self) -> Store:
        settings = self.settings
        return Store(url_of(settings), settings, self.cipher, tables_remedy=self.tables_remedy)

    @part
    def clock(self) -> Clock:
        return Clock(self.ask_now)

    @part
    def new_id(self) -> IdMaker:
        return IdMaker(wall_ms, self.settings.shard)

    @part
    def policy_cache(self) -> PolicyCache:
        return PolicyCache(self.store.policies.unless_known)

    @part
    def transactions(self) -> CallerTransactions:
        return CallerTransactions(self._ambient_transaction, self.store.database.remedy_at)

    # -- timers -----------------------------------------------------------------------------------

    @part
    def publisher(self) -> Publisher:
        settings = self.settings
        return Publisher(self.celery, settings.namespace, settings.publish_limit_s, self.events)

    @part
    def eta_timer(self) -> EtaTimer:
        return EtaTimer(self.publisher, self.clock)

    @part
    def direct_timer(self) -> DirectTimer | None:
        """The timer if no broker is used."""
        if self.settings.uses_broker:
            return None
        return DirectTimer(self.store.notices, self.clock)

    @part
    def redis_timer(self) -> RedisTimer | None:
        """The timer if it is of this kind."""
        if self.settings.timer_kind != "redis":
            return None
        from delaytasks.broker.redis_timer import RedisTimer, redis_location

        settings, conf = self.settings, self.celery.conf
        location = redis_location(
            settings.redis_url, conf.broker_url, conf.broker_transport_options
        )
        return RedisTimer(location, settings, self.eta_timer, self.clock, self.events)

    @part
    def sender(self) -> Sender:
        """The thread that arms rows."""
        timer = self.direct_timer or self.redis_timer or self.eta_timer
        return Sender(timer, self.clock, self.settings.publish_limit_s)

    @part
    def timer(self) -> Timer:
        """Arms rows in bounded time."""
        return self.direct_timer or self.sender

    def arm_near(self, entries: Iterable[Entry], slack_s: float = 0.0) -> None:
        """Arm the entries that are due within the horizon, or `slack_s` later."""
        reach_s = (self.settings.horizon_s or math.inf) + slack_s
        until_us = self.clock.now_us() + reach_s * 1e6
        if near := [entry for entry in entries if entry.due_us <= until_us]:
            self.timer.arm(near)

    @part
    def producer_timer(self) -> Timer:
        """Arms the rows of producers, which do not wait for it with `arm="background"`."""
        is_background = self.settings.arm == "background" and can_run_threads()
        return BackgroundTimer(self.sender) if is_background else self.timer

    # -- schedule and sweep -----------------------------------------------------------------------

    @part
    def queues(self) -> QueueRouting:
        return QueueRouting(self.settings, self.registry)

    @part
    def producer(self) -> Producer:
        return Producer(self)

    @part
    def sweeper(self) -> Sweeper:
        from delaytasks.worker.sweep import Sweeper

        return Sweeper(self)

    def make_recurring_tasks(self) -> None:
        if self.store.sweeps.has_due_schedule(self.settings.recurring_lead_s):
            from delaytasks.recurring.creation import create

            create(self)

    def purge_statistics(self) -> None:
        from delaytasks.operate.statistics import purge

        purge(self.store, self.clock.now())

    # -- operations -------------------------------------------------------------------------------

    @part
    def http_callbacks(self) -> HttpCallbacks:
        from delaytasks.callbacks.sending import Guard, HttpCallbacks

        return HttpCallbacks(self.settings, Guard(self.settings.callback_allow), self.clock)

    @part
    def queue_callbacks(self) -> Callable[[Message, DelayedTask], Outcome]:
        from delaytasks.callbacks.sending import send_message

        return partial(send_message, self)

    @part
    def queue_links(self) -> ConfirmingLinks:
        """The links to the broker of callbacks to queues."""
        settings = self.settings
        limit_s, url = settings.callback_connect_s, settings.callback_broker_url
        return ConfirmingLinks(self.celery, limit_s, url)

    @part
    def confirming_links(self) -> ConfirmingLinks:
        """The links for the messages of Celery tasks that waited as rows."""
        return ConfirmingLinks(self.celery, CONFIRM_LIMIT_S)

    @part
    def celery_tasks(self) -> CeleryTasks:
        from delaytasks.durable_eta.messages import CeleryTasks

        return CeleryTasks(self)

    @part
    def recurring_table(self) -> RecurringTable:
        from delaytasks.recurring.creation import RecurringTable

        return RecurringTable(self.store.database, self.store.schema)

    @part
    def async_calls(self) -> AsyncCalls:
        return AsyncCalls(self)

    # -- end --------------------------------------------------------------------------------------

    def flush(self) -> bool:
        """Arm the entries that wait for the sender. Return False if that takes too long."""
        sender = self._made("sender")
        return sender is None or sender.flush()

    def close(self) -> None:
        """Send the entries that wait to be armed, and close the connections of all made parts."""
        senders = "async_calls", "sender", "redis_timer"
        links = "queue_links", "confirming_links", "publisher", "store"
        for name in (*senders, *links):
            if (made := self._made(name)) is not None:
                made.close()

    def _made(self, name: str) -> Any:
        return self.__dict__.get(name)


# -- The calls of twins ----------------------------------------------------------------------------


#: The calls that start in one turn of an event loop. Each takes up to half a millisecond of the
#: loop's thread, so a burst of some hundred calls would delay all other callbacks by the sum.
STARTS_PER_TURN = 8


class AsyncCalls:
    """Runs a call on the caller's `AsyncSession` or `AsyncConnection`, or as a web framework
    requires, else in a thread of a pool."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # As many as an engine keeps connections, so that concurrent calls do not wait for one.
        self._threads = ThreadPool(runtime.settings.pool_size, "delaytasks-async")
        #: The last event loop, and what limits the calls that start in each of its turns.
        self._starts: tuple[object, asyncio.Semaphore] = None, asyncio.Semaphore(STARTS_PER_TURN)

    async def run(self, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Return the result of a synchronous method."""
        loop = asyncio.get_running_loop()
        of, starts = self._starts
        if of is not loop:
            starts = asyncio.Semaphore(STARTS_PER_TURN)
            self._starts = loop, starts
        await starts.acquire()
        loop.call_soon(starts.release)  # in the next turn
        has_session = "session" in options
        session = options.pop("session", None)
        if has_session and session is None:
            session = self._runtime.transactions.current_session()
        call = partial(method, *arguments, **options)
        if session is None:
            return await self._in_thread(call)
        clock = self._runtime.clock
        if clock.is_due:  # it must not be read from the database on the event loop
            await self._in_thread(clock.certain_now)
        return await run_in_session(session, lambda session: call(session=session))

    def close(self) -> None:
        self._threads.close()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        in_framework = self._runtime.in_framework(call)
        result: T = await (in_framework or asyncio.wrap_future(self._threads.submit(call)))
        return result


def runtime_of(delays: DelayTasks) -> Runtime:
    """Return the objects behind `delays`."""
    return delays._runtime
