"""Checks the arguments of a call and builds the tasks. Nothing is written here."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, NamedTuple, get_args

from delaytasks.core.body import FIRST_VERSION, check_version, encode_body, plain
from delaytasks.core.celery_calls import add_trace
from delaytasks.core.errors import InvalidDelayError, InvalidScheduleError
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import (
    check_concurrency_key,
    check_delay,
    check_due,
    check_instant,
    check_key,
    check_period,
    check_priority,
    check_queue,
    check_tag,
    check_wait,
    encode_meta,
    share_of,
)
from delaytasks.core.retry_schedule import MAX_RETRY_DELAY_S, retry_schedule_of
from delaytasks.core.settings import Settings
from delaytasks.core.task import DelayTask, NewTask, OnConflict
from delaytasks.core.text import shown
from delaytasks.processors.registry import ProcessorSpec, Registry
from delaytasks.scheduling.queue_routing import QueueRouting


class Tag(NamedTuple):
    """A checked tag, with the queue and the processor of its tasks."""

    name: str
    queue: str
    processor: ProcessorSpec | None


class RowBatch(NamedTuple):
    """Tasks that are written in one transaction."""

    #: Tasks that one statement inserts.
    plain: list[DelayTask]
    #: Tasks with a key or with the caller's id, which are inserted one by one; the flag says that
    #: the id is the caller's.
    named: list[tuple[DelayTask, bool]]

    @property
    def first(self) -> DelayTask:
        return self.plain[0] if self.plain else self.named[0][0]


class BuildCache:
    """Checked values that tasks of the same call share."""

    def __init__(self, now: datetime) -> None:
        self.now = now
        self.tags: dict[str, Tag] = {}
        #: For each delay, the due time and the delay in whole seconds.
        self.delays: dict[Any, tuple[datetime, int]] = {}


class TaskBuilder:
    def __init__(
        self,
        settings: Settings,
        make_id: Callable[[], int],
        registry: Registry,
        queues: QueueRouting,
    ) -> None:
        self._settings = settings
        self._make_id = make_id
        self._registry = registry
        self._queues = queues

    def many(
        self, asked: Iterable[NewTask], on_conflict: OnConflict, now: datetime
    ) -> list[DelayTask]:
        """Build the tasks as if all of them were scheduled at `now`."""
        check_on_conflict(on_conflict)
        cache = BuildCache(now)
        tasks = [self._build(new, on_conflict, cache) for new in asked]
        add_trace(tasks)
        return tasks

    def batch(self, asked: Iterable[NewTask], on_conflict: OnConflict, now: datetime) -> RowBatch:
        """Build the tasks that are written in one transaction."""
        named: list[NewTask] = []

        def unnamed() -> Iterator[NewTask]:
            for new in asked:
                if new.key is None and new.id is None:
                    yield new
                else:
                    named.append(new)

        plain = self.many(unnamed(), on_conflict, now)
        tasks = self.many(named, on_conflict, now)
        has_own_id = (new.id is not None for new in named)
        return RowBatch(plain, list(zip(tasks, has_own_id, strict=True)))

    def _build(self, new: NewTask, on_conflict: OnConflict, cache: BuildCache) -> DelayTask:
        tag = cache.tags.get(new.tag) if type(new.tag) is str else None
        if tag is None:
            tag = self._tag(new.tag)
            cache.tags[tag.name] = tag
        id = self._make_id() if new.id is None else check_id(new.id)
        due, delay_s = self._due(new, cache)
        if new.spread is not None:
            due, delay_s = self._spread(new, id, due, cache)
        max_wait_s = _max_wait_s(new, on_conflict, self._settings.max_delay_s)
        if max_wait_s is not None:
            due = min(due, cache.now + timedelta(seconds=max_wait_s))
        body = plain(new.body)
        body_json = encode_body(body, self._settings.max_body_bytes)
        concurrency_key, processor = new.concurrency_key, tag.processor
        body_version = _body_version(new, processor)
        if processor is not None:
            if concurrency_key is None and processor.concurrency_key is not None:
                concurrency_key = processor.concurrency_key(body)
            if processor.schema is not None:
                self._check_body(processor, body_version, body_json)
        return DelayTask(
            id=id,
            tag=tag.name,
            body_json=body_json,
            expected_time=due,
            queue=tag.queue if new.queue is None else check_queue(new.queue),
            priority=check_priority(new.priority),
            key=None if new.key is None else check_key(new.key),
            delay_s=delay_s,
            headers_json=_headers(new, max_wait_s, body_version),
            concurrency_key=None
            if concurrency_key is None
            else check_concurrency_key(concurrency_key),
            create_time=cache.now,
            meta_json=None if new.meta is None else encode_meta(new.meta),
        )

    @staticmethod
    def _check_body(processor: ProcessorSpec, version: int, body_json: str) -> None:
        """Convert the value that the worker will read, as the worker will do it."""
        body, versions = json.loads(body_json), processor.versions
        if versions is not None and versions.is_newer(version):
            return
        processor.checked(body if versions is None else versions.upgraded(body, version))

    def _due(self, new: NewTask, cache: BuildCache) -> tuple[datetime, int]:
        """Return the due time, and the seconds until then."""
        check_due(new.delay, new.at)
        if new.at is not None:
            due = max(check_instant(new.at), cache.now)
            return due, math.ceil(
                check_delay(due - cache.now, self._settings.max_delay_s).total_seconds()
            )
        is_number = type(new.delay) in (int, float)
        found = cache.delays.get(new.delay) if is_number else None
        if found is None:
            delay = check_delay(new.delay, self._settings.max_delay_s)
            found = cache.now + delay, math.ceil(delay.total_seconds())
            if is_number:
                cache.delays[new.delay] = found
        return found

    def _spread(
        self, new: NewTask, id: int, due: datetime, cache: BuildCache
    ) -> tuple[datetime, int]:
        """Return a due time in the period after `due`, and the seconds until then.

        A call that repeats an earlier one, by the same id or key, gets the same place in the
        period.
        """
        max_s = self._settings.max_delay_s
        period = check_period(new.spread, max_s)
        name = str(id) if new.key is None else f"{new.tag}\0{new.key}"
        # The sum is checked, since the due time itself may be as late as the setting allows.
        delay = check_delay(due - cache.now + share_of(name) * period, max_s)
        return cache.now + delay, math.ceil(delay.total_seconds())

    def _tag(self, asked: object) -> Tag:
        name = check_tag(asked)
        processor = self._registry.get(name)
        if processor is None:
            self._registry.check_unknown(name, self._settings.tags, self._settings.strict_tags)
        return Tag(name, self._queues.of(name), processor)


def popped(items: list[NewTask]) -> Iterator[NewTask]:
    """Remove and yield each item: with fewer live objects, garbage collections are rarer."""
    items.reverse()
    while items:
        yield items.pop()


def check_on_conflict(on_conflict: object) -> None:
    if on_conflict not in get_args(OnConflict):
        raise InvalidScheduleError(
            f"on_conflict is 'reject', 'keep', 'replace' or 'take', not {shown(on_conflict)}"
        )


def _max_wait_s(new: NewTask, on_conflict: OnConflict, longest_s: float) -> float | None:
    if new.max_wait is None:
        return None
    if new.key is None or on_conflict != "replace":
        raise InvalidScheduleError(
            "max_wait is for a key= with on_conflict='replace': no other call defers a task"
        )
    seconds = check_wait(new.max_wait, longest_s, "max_wait")
    if seconds == 0:
        raise InvalidDelayError("max_wait is more than 0")
    return seconds


def _body_version(new: NewTask, processor: ProcessorSpec | None) -> int:
    if new.body_version is None:
        versions = None if processor is None else processor.versions
        return FIRST_VERSION if versions is None else versions.version
    try:
        return check_version(new.body_version)
    except ValueError as error:
        raise InvalidScheduleError(str(error)) from None


def _headers(new: NewTask, max_wait_s: float | None, body_version: int) -> str | None:
    """Return the column `headers`: the version of the body, and the options of the task itself."""
    options = (new.retries, new.expires, max_wait_s)
    if body_version == FIRST_VERSION and options == (None, None, None):
        return None
    headers: dict[str, Any] = {}
    if body_version != FIRST_VERSION:
        headers["body_version"] = body_version
    if new.retries is not None:
        retry_schedule = retry_schedule_of(new.retries)
        headers["retry"] = {
            "retry_delays_s": retry_schedule.retry_delays_s,
            "jitter": retry_schedule.jitter,
        }
    if new.expires is not None:
        headers["expires_s"] = check_wait(new.expires, MAX_RETRY_DELAY_S)
    if max_wait_s is not None:
        headers["max_wait_s"] = max_wait_s
    return json.dumps(headers, separators=(",", ":"))
