"""What is checked before a process works: its settings, and the tasks that this code could not run.

A worker checks the settings at its start. `check` reads all waiting tasks before a deployment, and
so may take minutes. Beat's schedule gets its entries here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Select, func, select

from delaytasks.broker.arming import SWEEP
from delaytasks.db.schema import BODY
from delaytasks.model.clock import json_fields
from delaytasks.model.errors import BodyRefusedError, ConfigError, StoreUnavailableError
from delaytasks.model.moves import LIVE
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import shown

if TYPE_CHECKING:
    from delaytasks.db.store import Store
    from delaytasks.registry import ProcessorSpec
    from delaytasks.runtime import Runtime

# -- The settings ---------------------------------------------------------------------------------


def add_sweeps(celery_app: Any, runtime: Runtime) -> None:
    """Add an entry for each sweep partition to beat's schedule, unless it has sweep entries."""
    settings = runtime.settings
    schedule = celery_app.conf.beat_schedule
    if not any(entry.get("task") == SWEEP for entry in schedule.values()):
        for sweep_partition in range(settings.sweep_partitions):
            entry = {"task": SWEEP, "schedule": settings.sweep_s, "args": (sweep_partition,)}
            schedule[f"delaytasks-sweep-{sweep_partition}"] = entry


#: The default of kombu.
REDIS_VISIBILITY_S = 3600.0
#: Content types that cannot carry code.
SAFE_CONTENT = {"json", "application/json", "msgpack", "application/x-msgpack"}
_REDIS_SCHEMES = ("redis", "unix:", "sentinel:")


def check_ready(runtime: Runtime) -> None:
    """Check the settings and the database."""
    check_settings(runtime)
    settings = runtime.settings
    try:
        runtime.store.check()
        # Another deployment on the same tables takes our tasks to its own queues.
        if settings.uses_broker and runtime.store.sweeps.is_shared(settings.silent_s):
            remedy = (
                "give both the same delaytasks_namespace and broker, or tables of their own "
                "(delaytasks_table_prefix); if you have changed it, stop the old workers"
            )
            runtime.events.emit("tables.shared", namespace=settings.namespace, remedy=remedy)
    except StoreUnavailableError as error:
        # Not an error of the configuration: a worker waits until the database is back.
        runtime.events.emit("store.down", error=str(error))


def check_settings(runtime: Runtime) -> None:
    """Check the settings without any connection."""
    _check_visibility(runtime)
    accepted = set(runtime.celery.conf.accept_content or ())
    unsafe = ", ".join(sorted(map(str, accepted - SAFE_CONTENT)))
    if unsafe:
        remedy = "accept_content = ['json'], or keep all but your own producers out of the broker"
        runtime.events.emit("content.unsafe", accepts=unsafe, remedy=remedy)
    _check_sweeps(runtime)


def _check_visibility(runtime: Runtime) -> None:
    """Compare the horizon with the time after which a broker delivers a message again.

    Our messages are acknowledged on receipt, but a blocked worker may leave them waiting.
    """
    conf, horizon = runtime.celery.conf, runtime.settings.horizon_s
    broker = conf.broker_url
    first = str(broker[0] if isinstance(broker, (list, tuple)) and broker else broker)
    default = REDIS_VISIBILITY_S if first.startswith(_REDIS_SCHEMES) else None
    visibility = (conf.broker_transport_options or {}).get("visibility_timeout", default)
    try:
        visible_s = None if visibility is None else float(visibility)
    except (TypeError, ValueError):
        given = f"visibility_timeout = {shown(visibility)} in broker_transport_options"
        raise ConfigError(f"{given} is no number of seconds") from None
    if horizon is not None and visible_s is not None and horizon >= visible_s:
        raise ConfigError(
            f"delaytasks_horizon = {horizon:g} s is not below the broker's "
            f"visibility_timeout = {visible_s:g}: messages could be delivered twice; "
            "lower the horizon, or raise visibility_timeout in broker_transport_options"
        )


def _check_sweeps(runtime: Runtime) -> None:
    """Raise `ConfigError` if an entry of beat names a sweep partition that does not exist."""
    settings, count = runtime.settings, runtime.settings.sweep_partitions
    for name, entry in (runtime.celery.conf.beat_schedule or {}).items():
        sweep_partition, *_ = entry.get("args") or (0,)
        if entry.get("task") == SWEEP and not settings.has_sweep_partition(sweep_partition):
            raise ConfigError(
                f"beat_schedule[{name!r}] names sweep partition {shown(sweep_partition)}, and "
                f"delaytasks_sweep has {count}: the sweep partitions are 0 to {count - 1}; "
                "correct its args, or leave the entries to delaytasks"
            )


# -- The waiting tasks that this code could not run -----------------------------------------------


#: Ids that one finding lists.
EXAMPLES = 5


class Finding(NamedTuple):
    """Tasks of one tag that this code could not run, and the reason."""

    tag: str
    tasks: int
    first_due: datetime
    problem: str
    #: Some of the tasks; empty if the finding is about all tasks of the tag.
    ids: list[int]
    #: The queues of the tasks, if known.
    queues: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return json_fields({**self._asdict(), "ids": [*map(str, self.ids)]})


def check_waiting(runtime: Runtime) -> Iterator[Finding]:
    """Compare the waiting tasks with the processors and the keys of this process.

    Yields one finding for each tag with tasks that this code could not run.
    """
    t = runtime.store.schema.tasks.c
    first_due = func.min(func.coalesce(t.due_time, t.expected_time))
    query = select(t.tag, t.queue, func.count(), first_due)
    query = query.group_by(t.tag, t.queue).order_by(t.tag, t.queue)
    # All tags are read first, so that one connection suffices.
    for tag, rows in groupby(list(_live(runtime.store, query)), itemgetter(0)):
        _, queues, tasks, dues = zip(*rows, strict=True)
        every = Finding(tag, sum(tasks), min(dues), "no processor", [], queues)
        processor = runtime.registry.get(tag)
        if processor is None:
            yield every
        elif processor.schema is not None or processor.body_version is not None:
            yield from _refused(runtime.store, every, processor)


def _refused(store: Store, every: Finding, processor: ProcessorSpec) -> Iterator[Finding]:
    """Yield a finding about the tasks of a tag whose bodies its processor cannot read, if there are
    any."""
    t, tag, cipher, tasks = store.schema.tasks.c, processor.tag, store.schema.cipher, 0
    ids = list[int]()
    due_time = func.coalesce(t.due_time, t.expected_time)
    query = select(t.id, t.message_body, due_time, t.headers).where(t.tag == tag)
    for id, body, due, headers in _live(store, query.order_by(due_time)):
        body = body if cipher is None else cipher.read(body, BODY, id, tag)
        task = DelayedTask(id, tag, body, due, headers_json=headers)
        if (problem := _problem(processor, task)) is not None:
            if not ids:
                every = every._replace(first_due=due, problem=problem)
            tasks += 1
            ids += [id] if tasks <= EXAMPLES else []
    if ids:
        yield every._replace(tasks=tasks, ids=ids)


def _problem(processor: ProcessorSpec, task: DelayedTask) -> str | None:
    if processor.is_newer(task.body_version):
        mine = processor.body_version
        return f"bodies of version {task.body_version}, and its processor has {mine}"
    try:
        processor.checked(task.body)
    except (BodyRefusedError, ValueError, RecursionError) as error:
        return str(error)
    return None


def _live(store: Store, query: Select[Any]) -> Iterator[Any]:
    """Yield the rows of a query about live tasks."""
    where = store.schema.tasks.c.status.in_([int(status) for status in LIVE])
    for rows in store.database.stream(query.where(where), size=1000, may_take_long=True):
        yield from rows
