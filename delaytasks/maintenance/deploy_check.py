"""Before a deploy: tasks that wait for what this code does not have, or can not read."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from delaytasks.core.encryption import is_encrypted, name_in
from delaytasks.core.errors import BodyRefusedError
from delaytasks.core.interfaces import Pending, UntrustedInput
from delaytasks.processors.registry import Registry

#: Ids that a finding names.
EXAMPLES = 5


class Finding(NamedTuple):
    """Tasks that would not run well with this code."""

    tag: str
    tasks: int
    first_due: datetime
    problem: str
    #: Some of them; none where all tasks of the tag are meant.
    ids: list[int]
    #: Where they wait, if that is known.
    queues: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "first_due": self.first_due.isoformat(),
            "ids": [str(id) for id in self.ids],
        }


def check(
    pending: Iterable[Pending],
    bodies: Callable[[str], Iterable[tuple[int, str, datetime]]],
    registry: Registry,
    strange: Iterable[UntrustedInput] = (),
    keys: Collection[str] = (),
) -> Iterator[Finding]:
    """`bodies(tag)` are (id, body, due) of tasks that wait, read with the keys of these names; it is asked where the
    tag's processor has a schema."""
    for some in pending:
        processor = registry.get(some.tag)
        if processor is None:
            yield Finding(some.tag, some.tasks, some.first_due, "no processor", [], some.queues)
        elif processor.schema is not None:
            refused: list[tuple[int, str, datetime]] = []
            count = 0
            for id, body, due in bodies(some.tag):
                if (problem := _problem(processor.schema, body, keys)) is not None:
                    count += 1
                    if len(refused) < EXAMPLES:
                        refused.append((id, problem, due))
            if refused:
                ids, problems, dues = zip(*refused, strict=True)
                yield Finding(some.tag, count, min(dues), problems[0], list(ids), some.queues)
    for row in strange:
        yield Finding(row.tag, row.tasks, row.first_due, row.problem, sorted(set(row.ids)))


def _problem(schema: Callable[[Any], Any], body: str, keys: Collection[str]) -> str | None:
    if is_encrypted(body):
        name = name_in(body)
        # One whose key is not here is among those that are strange.
        problem = f"encrypted with key {name}, which is here, and changed since, or another task's"
        return problem if name in keys else None
    try:
        schema(json.loads(body))
    except (BodyRefusedError, ValueError, RecursionError) as error:
        return str(error)
    return None
