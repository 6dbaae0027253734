"""Before a deployment: find the waiting tasks that the new code could not run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from delaytasks.core.encryption import is_encrypted, name_in
from delaytasks.core.errors import BodyRefusedError
from delaytasks.core.interfaces import Pending, UntrustedInput
from delaytasks.processors.registry import Registry

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
        return {
            **self._asdict(),
            "first_due": self.first_due.isoformat(),
            "ids": [str(id) for id in self.ids],
        }


def find_problems(
    pending: Iterable[Pending],
    bodies: Callable[[str], Iterable[tuple[int, str, datetime]]],
    registry: Registry,
    strange: Iterable[UntrustedInput] = (),
    keys: Collection[str] = (),
) -> Iterator[Finding]:
    """Compare the waiting tasks with the registered processors.

    Parameters
    ----------
    pending
        The waiting tasks, summed up by tag.
    bodies
        Returns `(id, body, due)` of the waiting tasks of a tag. It is called only for tags whose
        processor has a schema.
    registry
        The processors of this code.
    strange
        Rows of other programs that no worker can run.
    keys
        The names of the encryption keys with which the bodies were read.

    Yields
    ------
    Finding
        One for each tag, and each problem of untrusted rows.
    """
    for waiting in pending:
        tag, queues = waiting.tag, waiting.queues
        processor = registry.get(tag)
        if processor is None:
            yield Finding(tag, waiting.tasks, waiting.first_due, "no processor", [], queues)
        elif processor.schema is not None:
            refused = _refused(processor.schema, bodies(tag), keys)
            count, examples = 0, list[tuple[int, datetime, str]]()
            for count, found in enumerate(refused, 1):
                if count <= EXAMPLES:
                    examples.append(found)
            if examples:
                ids, dues, problems = zip(*examples, strict=True)
                yield Finding(tag, count, min(dues), problems[0], list(ids), queues)
    for row in strange:
        yield Finding(row.tag, row.tasks, row.first_due, row.problem, sorted(set(row.ids)))


def _refused(
    schema: Callable[[Any], Any],
    bodies: Iterable[tuple[int, str, datetime]],
    keys: Collection[str],
) -> Iterator[tuple[int, datetime, str]]:
    """Yield the id, the due time and the problem of each task whose body the schema refuses."""
    for id, body, due in bodies:
        problem = _problem(schema, body, keys)
        if problem is not None:
            yield id, due, problem


def _problem(schema: Callable[[Any], Any], body: str, keys: Collection[str]) -> str | None:
    if is_encrypted(body):
        name = name_in(body)
        # A body whose key is missing is reported among the rows of other programs.
        problem = f"encrypted with key {name}, which is here, and changed since, or another task's"
        return problem if name in keys else None
    try:
        schema(json.loads(body))
    except (BodyRefusedError, ValueError, RecursionError) as error:
        return str(error)
    return None
