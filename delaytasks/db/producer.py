"""Checks what callers schedule, writes the rows, and arms them after the commit."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime, timedelta
from fnmatch import translate
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from billiard.exceptions import SoftTimeLimitExceeded

from delaytasks.db.database import is_on_the_loop
from delaytasks.db.sessions import transaction_of
from delaytasks.model.body import FIRST_VERSION, check_version, encode_body, plain
from delaytasks.model.clock import LATEST, to_us
from delaytasks.model.errors import DuplicateTaskError, InvalidInputError
from delaytasks.model.filters import batches
from delaytasks.model.inputs import (
    MAX_DELAY_S,
    Delay,
    check_choice,
    check_delay,
    check_id,
    check_instant,
    check_key,
    check_limit_key,
    check_priority,
    check_queue,
    check_tag,
    check_wait,
    encode_meta,
    share_of,
)
from delaytasks.model.moves import Status, retry_schedule_of
from delaytasks.model.task import (
    CallerConnection,
    DelayedTask,
    Entry,
    NewTask,
    OnConflict,
    Transaction,
)
from delaytasks.settings import Settings

if TYPE_CHECKING:
    from delaytasks.registry import ProcessorSpec, Registry
    from delaytasks.runtime import Runtime

logger = logging.getLogger("delaytasks")

# -- Selects the queue of a tag -------------------------------------------------------------------


_WILDCARD = re.compile(r"\[.*?\]|[*?]")


class QueueRouting:
    """The queue of the tag's processor, else of the setting `queues`, else the default queue.

    The setting maps tags and patterns to queues. A tag goes before patterns, and a pattern with
    more characters that are no wildcards goes before one with fewer.
    """

    def __init__(self, settings: Settings, registry: Registry) -> None:
        self._registry = registry
        self._default = settings.default_queue
        self._named = settings.queues
        patterns = sorted(
            filter(_WILDCARD.search, self._named), key=lambda p: -len(_WILDCARD.sub("", p))
        )
        self._patterns = [
            (re.compile(translate(pattern)), self._named[pattern]) for pattern in patterns
        ]

    def of(self, tag: str) -> str:
        queue = self._registry.queue_of(tag) or self._named.get(tag)
        if queue is not None:
            return queue
        return next(
            (queue for pattern, queue in self._patterns if pattern.match(tag)), self._default
        )

    def all(self) -> set[str]:
        """Return the queues that a tag can have."""
        return {self._default, *self._named.values(), *self._registry.queues()}


# -- What a task is built from --------------------------------------------------------------------


class Tag(NamedTuple):
    """A checked tag, with the queue and the processor of its tasks."""

    name: str
    queue: str
    processor: ProcessorSpec | None


class BuildCache:
    """Checked values that tasks of the same call share."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.tags: dict[str, Tag] = {}
        #: For each delay, the due time and the delay in whole seconds.
        self.delays: dict[Any, tuple[datetime, int]] = {}


#: Producers arm a little beyond the horizon. A row that is committed while a sweep reads is then
#: armed by the producer or found by the sweep.
SLACK_S = 1.0
#: A row in a caller's transaction is kept for arming if it is due within the horizon and this time.
#: If the commit comes even later, the sweep finds the row.
TRANSACTION_S = 3600.0
#: A row that is armed just before its commit is due no earlier than this. Otherwise a worker could
#: look for the row before the commit.
COMMIT_US = 50_000
#: Rows in one batch of `schedule_many`.
BULK = 5000
ID_TRIES = 5
#: Is called with the tasks of each batch that was written.
OnBatch = Callable[[Sequence[DelayedTask]], None]
CallTimer = Callable[[Callable[[list[Entry]], object], list[Entry]], object]


class Producer:
    def __init__(self, runtime: Runtime) -> None:
        self._settings = runtime.settings
        self._db = runtime.store.database
        self._tasks = runtime.store.tasks
        self._rows = self._tasks.new
        self._clock = runtime.clock
        self._make_id = runtime.new_id
        self._timer = runtime.producer_timer
        #: Calls the timer. In the testing kit, errors of tasks that run inline reach the test.
        self.call_timer: CallTimer = _without_errors
        self._events = runtime.events
        self._registry = runtime.registry
        self._queues = runtime.queues
        direct = runtime.direct_timer
        #: Notifies workers of entries when a transaction is committed; None with a broker.
        self._notify = None if direct is None else direct.notify

    # -- check ------------------------------------------------------------------------------------

    def build(
        self, asked: Iterable[NewTask], on_conflict: OnConflict, now: datetime | None = None
    ) -> list[DelayedTask]:
        """Return the checked tasks, as if all of them were scheduled at `now`; write nothing."""
        check_on_conflict(on_conflict)
        cache = BuildCache(now or self._clock.certain_now())
        tasks = [self._build(new, on_conflict, cache) for new in asked]
        if trace_sources:
            _add_trace(tasks)
        return tasks

    def _build(self, new: NewTask, on_conflict: OnConflict, cache: BuildCache) -> DelayedTask:
        tag = cache.tags.get(new.tag) if type(new.tag) is str else None
        if tag is None:
            tag = self._tag(new.tag)
            cache.tags[tag.name] = tag
        id = self._make_id() if new.id is None else check_id(new.id)
        key = None if new.key is None else check_key(new.key)
        due, delay_s = self._due(new.delay, new.at, cache)
        if new.jitter is not None:
            # A call that repeats an earlier one, by the same id or key, gets the same place.
            name = str(id) if key is None else f"{tag.name}\0{key}"
            due, delay_s = self._spread(new.jitter, name, due, cache)
        body = plain(new.body)
        body_json = encode_body(body, self._settings.max_body_bytes)
        limit_key, processor = new.limit_key, tag.processor
        body_version = _body_version(new, processor)
        if processor is not None:
            if limit_key is None and processor.limit_key is not None:
                limit_key = processor.limit_key(body)
            if processor.schema is not None:
                self._check_body(processor, body_version, body_json)
        return DelayedTask(
            id=id,
            tag=tag.name,
            body_json=body_json,
            expected_time=due,
            queue=tag.queue if new.queue is None else check_queue(new.queue),
            priority=check_priority(new.priority),
            key=key,
            delay_s=delay_s,
            headers_json=_headers(new, body_version),
            limit_key=None if limit_key is None else check_limit_key(limit_key),
            create_time=cache.now,
            meta_json=None if new.meta is None else encode_meta(new.meta),
        )

    @staticmethod
    def _check_body(processor: ProcessorSpec, version: int, body_json: str) -> None:
        """Convert the value that the worker will read, as the worker will do it."""
        if not processor.is_newer(version):
            processor.checked(json.loads(body_json))

    def _due(self, delay: Any, at: datetime | None, cache: BuildCache) -> tuple[datetime, int]:
        """Return the due time, and the seconds until then."""
        if (delay is None) == (at is None):
            raise InvalidInputError("give a delay or an instant (at), one of the two", "delay")
        is_number = type(delay) in (int, float)
        found = cache.delays.get(delay) if is_number else None
        if found is None:
            if at is None:
                left = check_delay(delay)
            else:
                left = check_delay(max(check_instant(at) - cache.now, timedelta()), "at")
            found = cache.now + left, math.ceil(left.total_seconds())
            if is_number:
                cache.delays[delay] = found
        return found

    def _spread(
        self, jitter: Delay, name: str, due: datetime, cache: BuildCache
    ) -> tuple[datetime, int]:
        """Return the due time in the period after `due` that `name` chooses, and the seconds until
        then.
        """
        period_s = check_wait(jitter, "jitter", MAX_DELAY_S, may_be_zero=False)
        # The sum is checked, since the due time itself may be as late as a delay allows.
        spread = timedelta(seconds=share_of(name) * period_s)
        delay = check_delay(due - cache.now + spread, "jitter")
        return cache.now + delay, math.ceil(delay.total_seconds())

    def _tag(self, asked: object) -> Tag:
        name = check_tag(asked)
        processor = self._registry.get(name)
        if processor is None:
            self._registry.check_unknown(name, self._settings.tags)
        return Tag(name, self._queues.of(name), processor)

    # -- one --------------------------------------------------------------------------------------

    def schedule(
        self, new: NewTask, on_conflict: OnConflict, transaction: Transaction | None
    ) -> DelayedTask:
        [task] = self.build([new], on_conflict)
        has_own_id = new.id is not None
        with transaction.guard(task.id) if transaction is not None else nullcontext() as on:
            is_new = task.key is None and not has_own_id and self._rows.insert(task, on)
            if not is_new:
                task, is_new = self._write(task, on_conflict, has_own_id, on)
        if is_new:
            self._events.emit("task.scheduled", **task.event_fields)
        if is_new or (has_own_id and task.status is Status.NOT_COMPLETE):
            # An earlier call with this id may have written the row and not have armed it.
            self.arm_after_commit([task], transaction)
        return task

    def _write(
        self,
        task: DelayedTask,
        on_conflict: OnConflict,
        has_own_id: bool,
        on: CallerConnection | None,
    ) -> tuple[DelayedTask, bool]:
        """Return the task that is stored afterwards, and whether it is new."""
        for _ in range(ID_TRIES):
            if task.key is not None:
                written = self._tasks.insert_keyed(task, on_conflict, on)
            else:
                written = (task, True) if self._rows.insert(task, on) else None
            if written is not None:
                stored, is_new = written
                return stored, is_new or (stored.id == task.id and not has_own_id)
            if has_own_id:  # the caller repeats a call whose outcome is unknown
                return self._tasks.read(task.id, on), False
            task = replace(task, id=self._make_id())
        raise _ids_are_taken()

    # -- many -------------------------------------------------------------------------------------

    def schedule_many(
        self,
        items: Iterable[NewTask],
        on_conflict: OnConflict,
        transaction: Transaction | None,
        on_batch: OnBatch | None,
    ) -> int:
        """Write the tasks in batches of `BULK` and return their number."""
        check_on_conflict(on_conflict)
        total = 0
        for batch in batches(items, BULK):
            total += self.schedule_batch(batch, on_conflict, transaction, on_batch)
        return total

    def schedule_batch(
        self,
        batch: list[NewTask],
        on_conflict: OnConflict,
        transaction: Transaction | None,
        on_batch: OnBatch | None,
    ) -> int:
        """Write tasks in one transaction, and arm those that are due soon.

        One statement inserts the tasks without a key or an id of the caller; the others follow one
        by one.
        """
        now = self._clock.certain_now()
        named = [new for new in batch if new.key is not None or new.id is not None]
        if named:
            batch = [new for new in batch if new.key is None and new.id is None]
        unnamed = self.build(popped(batch), on_conflict, now)
        has_own_id = [new.id is not None for new in named]
        others = list(zip(self.build(named, on_conflict, now), has_own_id, strict=True))

        def write(on: CallerConnection | None) -> list[DelayedTask]:
            self._write_plain(unnamed, on)
            written = [self._write(task, on_conflict, is_own, on) for task, is_own in others]
            return [*unnamed, *(task for task, is_new in written if is_new)]

        id = unnamed[0].id if unnamed else others[0][0].id
        with transaction.guard(id) if transaction is not None else nullcontext() as on:
            is_ours = on is None and bool(named)
            tasks = self._db.transaction(write, unknown_id=id) if is_ours else write(on)
        for tag, count in Counter(task.tag for task in tasks).items():
            self._events.emit("task.scheduled", count=count, tag=tag)
        self.arm_after_commit(tasks, transaction)
        if on_batch is not None:
            on_batch(tasks)
        return len(tasks)

    def _write_plain(self, plain: list[DelayedTask], on: CallerConnection | None) -> None:
        for _ in range(ID_TRIES):
            if not plain or self._rows.insert_many(plain, on):
                return
            # The new ids go into the batch itself, which counts if the transaction is repeated.
            plain[:] = [replace(task, id=self._make_id()) for task in plain]
        raise _ids_are_taken()

    # -- arm --------------------------------------------------------------------------------------

    def arm_after_commit(
        self, tasks: Sequence[DelayedTask], transaction: Transaction | None
    ) -> None:
        if transaction is None:
            self.arm(tasks)
            return
        entries: list[Entry] = []
        if self._notify is None or transaction.stands_alone:
            entries = self._near(tasks, TRANSACTION_S)
        elif tasks:
            with transaction.guard() as on:
                self._notify([Entry.of(task) for task in tasks], on)
        if entries or transaction.reports_changes:
            transaction.after_commit(entries, self.arm_entries)

    def arm(self, tasks: Sequence[DelayedTask]) -> None:
        """Arm the timer for tasks that are due soon. If that fails, the sweep finds the rows."""
        if near := self._near(tasks, SLACK_S):
            self.call_timer(self._timer.arm, near)

    def arm_entries(self, entries: Sequence[Entry], is_committed: bool = True) -> None:
        """Do the same for entries, which may be part of a transaction that is about to commit."""
        until_us = to_us(self._near_until(SLACK_S))
        near = [entry for entry in entries if entry.due_us <= until_us]
        if not is_committed:
            soonest_us = self._clock.now_us() + COMMIT_US
            near = [entry._replace(due_us=max(entry.due_us, soonest_us)) for entry in near]
        if near:
            self.call_timer(self._timer.arm, near)

    def _near(self, tasks: Sequence[DelayedTask], slack_s: float) -> list[Entry]:
        until = self._near_until(slack_s)
        return [Entry.of(task) for task in tasks if task.expected_time <= until]

    def _near_until(self, slack_s: float) -> datetime:
        """Return the latest due time that a producer arms."""
        horizon_s = self._settings.horizon_s
        return LATEST if horizon_s is None else self._clock.after(horizon_s + slack_s)

    def due_of(self, delay: Any, at: datetime | None = None) -> datetime:
        """Return the due time that a delay or an instant means."""
        return self._due(delay, at, BuildCache(self._clock.certain_now()))[0]


def _without_errors(call: Callable[[list[Entry]], object], entries: list[Entry]) -> None:
    """Call a method of the timer. No error escapes, since the rows are written already: a caller
    that repeats its call would make two tasks, and the sweep finds the rows."""
    try:
        call(entries)
    except SoftTimeLimitExceeded:  # of the processor that schedules
        raise
    except Exception:
        logger.exception("arming %d tasks failed; the sweep will find them", len(entries))


def popped(items: list[NewTask]) -> Iterator[NewTask]:
    """Remove and yield each item: with fewer live objects, garbage collections are rarer."""
    items.reverse()
    while items:
        yield items.pop()


def check_on_conflict(on_conflict: object) -> None:
    check_choice(on_conflict, "on_conflict", get_args(OnConflict))


def _body_version(new: NewTask, processor: ProcessorSpec | None) -> int:
    if new.body_version is None:
        return (processor and processor.body_version) or FIRST_VERSION
    return check_version(new.body_version)


def _headers(new: NewTask, body_version: int) -> str | None:
    """Return the column `headers`: the version of the body, and the options of the task itself."""
    if body_version == FIRST_VERSION and new.retries is None and new.max_late is None:
        return None
    headers: dict[str, Any] = {}
    if body_version != FIRST_VERSION:
        headers["body_version"] = body_version
    if new.retries is not None:
        retry_schedule = retry_schedule_of(new.retries)
        headers["retry"] = {
            "retry_delays_s": retry_schedule.retry_delays_s,
            "variation": retry_schedule.variation,
        }
    if new.max_late is not None:
        headers["max_late_s"] = check_wait(new.max_late, "max_late")
    return json.dumps(headers, separators=(",", ":"))


def _ids_are_taken() -> DuplicateTaskError:
    return DuplicateTaskError(
        f"{ID_TRIES} times in a row an id was taken; is another program writing ids?"
    )


# -- The transactions of callers ------------------------------------------------------------------


class CallerTransactions:
    """The transaction of `session=`, or without it the one that a web framework has open."""

    def __init__(
        self, ambient: Callable[[], Transaction | None], remedy_at: Callable[[Any], str]
    ) -> None:
        """`remedy_at` says how to make the tables that a session on a URL does not find."""
        self._ambient = ambient
        self._remedy_at = remedy_at
        self._session: ContextVar[Any] = ContextVar("delaytasks_session", default=None)

    @contextmanager
    def using(self, session: Any) -> Iterator[None]:
        """Let calls without `session=` inside the block take part in the session's transaction."""
        token = self._session.set(session)
        try:
            yield
        finally:
            self._session.reset(token)

    def current_session(self) -> Any:
        """Return the session of the innermost block, or None."""
        return self._session.get()

    def of(self, session: Any) -> Transaction | None:
        session = self.current_session() if session is None else session
        if session is None:
            return self._ambient()
        return transaction_of(session, self._remedy_at)

    def of_new(self, session: Any, twin: str) -> Transaction | None:
        """Return the transaction of a new task, and warn of a call that stops an event loop.

        `twin` is the name of the call's asynchronous twin."""
        transaction = self.of(session)
        if (
            transaction is None
            and asyncio._get_running_loop() is not None
            # Drivers of browsers run synchronous code beside a loop, and outside its tasks.
            and asyncio.current_task() is not None
            and not is_on_the_loop()
        ):
            warnings.warn(
                f"{twin[1:]} blocks the event loop of this coroutine: await {twin}",
                RuntimeWarning,
                stacklevel=3,
            )
        return transaction

    @contextmanager
    def guard(self, session: Any) -> Iterator[Transaction | None]:
        """Yield the transaction; translate driver errors inside the block into ours."""
        transaction = self.of(session)
        with transaction.guard() if transaction is not None else nullcontext():
            yield transaction


# -- The trace context of the caller, which travels in the meta of new tasks -----------------------


#: Returns the pairs of meta for new tasks of one tag. The tasks are not written yet.
TraceSource = Callable[[str, Sequence[DelayedTask]], Mapping[str, str]]
#: The sources of Sentry and OpenTelemetry, which belong to the process as their tracers do.
trace_sources: list[TraceSource] = []


def _add_trace(tasks: Sequence[DelayedTask]) -> None:
    by_tag: dict[str, list[DelayedTask]] = {}
    for task in tasks:
        by_tag.setdefault(task.tag, []).append(task)
    for tag, group in by_tag.items():
        for source in trace_sources:
            try:
                pairs = source(tag, group)
            except Exception:  # a tracer must not prevent the call that it traces
                logger.exception("the trace context of new tasks is not known")
                continue
            for task in group if pairs else ():
                with suppress(InvalidInputError):  # there is no room for the pairs
                    task.meta_json = encode_meta({**pairs, **task.meta})
