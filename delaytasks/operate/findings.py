"""What `check` reads before a deployment: the waiting tasks that this code could not run.

The queries read all waiting tasks, and so may take minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Select, and_, func, select

from delaytasks.db.schema import BODY
from delaytasks.db.types import db_now_plus
from delaytasks.model.errors import BodyRefusedError
from delaytasks.model.inputs import MAX_DELAY_S, show_duration
from delaytasks.model.moves import LIVE, Status
from delaytasks.model.task import DelayedTask

if TYPE_CHECKING:
    from delaytasks.registry import ProcessorSpec
    from delaytasks.runtime import Runtime

#: Ids that one finding lists.
EXAMPLES = 5
#: A lease that ends after this number of lease periods cannot be ours.
LONG_LEASES = 100


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
        return {
            **self._asdict(),
            "first_due": self.first_due.isoformat(),
            "ids": [str(id) for id in self.ids],
        }


class WaitingTasks:
    """Compares the waiting tasks with the processors, the settings and the keys of this process."""

    def __init__(self, runtime: Runtime) -> None:
        self._db, self._schema = runtime.store.database, runtime.store.schema
        self._settings, self._registry = runtime.settings, runtime.registry
        self._t = t = self._schema.tasks.c
        self._is_live = t.status.in_([int(status) for status in LIVE])

    def findings(self) -> Iterator[Finding]:
        """Yield one finding for each tag, and then those about rows that no worker takes."""
        for every in self.by_tag():
            processor = self._registry.get(every.tag)
            if processor is None:
                yield every
            elif processor.schema is not None or processor.body_version is not None:
                tasks, examples = 0, list[Finding]()
                for tasks, refused in enumerate(self._refused(processor), 1):
                    if tasks <= EXAMPLES:
                        examples.append(refused)
                if examples:
                    ids = [each.ids[0] for each in examples]
                    yield examples[0]._replace(tasks=tasks, ids=ids, queues=every.queues)
        yield from self._untimely()

    def by_tag(self) -> list[Finding]:
        """Return the waiting tasks of each tag, as if it had no processor."""
        t, found = self._t, dict[str, Finding]()
        first_due = func.min(func.coalesce(t.due_time, t.expected_time))
        query = select(t.tag, t.queue, func.count(), first_due).where(self._is_live)
        for tag, queue, tasks, due in self._all(
            query.group_by(t.tag, t.queue).order_by(t.tag, t.queue)
        ):
            one = Finding(tag, tasks, due, "no processor", [], (queue,))
            found[tag] = _both(found[tag], one) if tag in found else one
        return list(found.values())

    def _refused(self, processor: ProcessorSpec) -> Iterator[Finding]:
        """Yield the tasks of a tag whose bodies its processor cannot read."""
        t, tag, cipher = self._t, processor.tag, self._schema.cipher
        query = select(t.id, t.message_body, t.expected_time, t.headers)
        mine = query.where(self._is_live, t.tag == tag).order_by(t.expected_time)
        for id, body, due, headers in self._all(mine):
            body = body if cipher is None else cipher.read(body, BODY, id, tag)
            problem = self._problem(
                processor, DelayedTask(id, tag, body, due, headers_json=headers)
            )
            if problem is not None:
                yield Finding(tag, 1, due, problem, [id])

    def _problem(self, processor: ProcessorSpec, task: DelayedTask) -> str | None:
        if processor.is_newer(task.body_version):
            mine = processor.body_version
            return f"bodies of version {task.body_version}, and its processor has {mine}"
        try:
            processor.checked(task.body)
        except (BodyRefusedError, ValueError, RecursionError) as error:
            return str(error)
        return None

    # -- rows of other programs -------------------------------------------------------------------

    def _untimely(self) -> Iterator[Finding]:
        """Yield rows whose times are too far away, so that no worker will take them."""
        t = self._t
        is_far = t.expected_time > db_now_plus(MAX_DELAY_S)
        is_long = t.lease_until > db_now_plus(LONG_LEASES * self._settings.lease_s)
        waits, runs = t.status == int(Status.NOT_COMPLETE), t.status == int(Status.RUNNING)
        problems = {
            f"due later than {show_duration(MAX_DELAY_S)} from now": and_(waits, is_far),
            "RUNNING, with a longer lease than any worker sets": and_(runs, is_long),
        }
        first, last = func.min(t.id), func.max(t.id)
        grouped = select(t.tag, func.count(), func.min(t.expected_time), first, last)
        for problem, is_so in problems.items():
            query = grouped.where(is_so).group_by(t.tag).order_by(t.tag)
            for tag, tasks, first_due, *ids in self._all(query):
                yield Finding(tag, tasks, first_due, problem, sorted({*ids}))

    def _all(self, query: Select[Any]) -> Iterator[Any]:
        for rows in self._db.stream(query, size=1000, may_take_long=True):
            yield from rows


def _both(a: Finding, b: Finding) -> Finding:
    """Return a finding about the tasks of both, with the first and the last id."""
    ids = {*a.ids, *b.ids}
    return a._replace(
        tasks=a.tasks + b.tasks,
        first_due=min(a.first_due, b.first_due),
        ids=sorted({min(ids), max(ids)}) if ids else [],
        queues=(*a.queues, *b.queues),
    )
