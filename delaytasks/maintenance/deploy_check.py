"""Before a deployment: find the waiting tasks that the new code could not run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from delaytasks.core.encryption import is_encrypted, name_in
from delaytasks.core.errors import BodyRefusedError
from delaytasks.core.interfaces import Pending, UntrustedInput
from delaytasks.core.task import DelayTask
from delaytasks.processors.registry import ProcessorSpec, Registry

#: Id, body, due time and headers of a waiting task.
WaitingBody = tuple[int, str, datetime, str | None]
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
    bodies: Callable[[str], Iterable[WaitingBody]],
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
        Returns the waiting tasks of a tag. It is called only for tags whose processor has a schema
        or a version.
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
        elif processor.schema is not None or processor.versions is not None:
            refused = _refused(processor, bodies(tag), keys)
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
    processor: ProcessorSpec, bodies: Iterable[WaitingBody], keys: Collection[str]
) -> Iterator[tuple[int, datetime, str]]:
    """Yield the id, the due time and the problem of each task whose body cannot be read."""
    for id, body, due, headers in bodies:
        problem = _problem(
            processor, DelayTask(id, processor.tag, body, due, headers_json=headers), keys
        )
        if problem is not None:
            yield id, due, problem


def _problem(processor: ProcessorSpec, task: DelayTask, keys: Collection[str]) -> str | None:
    versions = processor.versions
    if versions is not None and versions.is_newer(task.body_version):
        return f"bodies of version {task.body_version}, and its processor has {versions.version}"
    if is_encrypted(task.body_json):
        name = name_in(task.body_json)
        # A body whose key is missing is reported among the rows of other programs.
        problem = f"encrypted with key {name}, which is here, and changed since, or another task's"
        return problem if name in keys else None
    try:
        processor.checked(processor.body_of(task))
    except (BodyRefusedError, ValueError, RecursionError) as error:
        return str(error)
    except Exception as error:  # an upgrade may raise any exception
        return (
            f"the upgrade from version {task.body_version} raises {type(error).__name__}: {error}"
        )
    return None
