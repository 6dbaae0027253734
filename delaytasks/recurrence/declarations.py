"""The recurring schedules that code declares, and how the table follows them.

Each worker compares the table with its code at its start and then every `FOLLOW_S`. A worker that
has the processor of a tag, or a Celery task, knows all declared schedules of it. It therefore adds
and changes them, and removes those that its code no longer declares. A pause belongs to the
operator and stays.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import TYPE_CHECKING

from delaytasks.core.errors import ConfigError, RecurringNotFoundError
from delaytasks.processors.registry import Registry
from delaytasks.recurrence.definition import Definition
from delaytasks.recurrence.operations import RecurringOperations
from delaytasks.recurrence.schedule import RecurringSchedule, is_same_definition
from delaytasks.recurrence.targets import is_known

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime


def follow(runtime: Runtime) -> None:
    """Make the declared schedules in the table those of this process.

    A declaration that cannot be stored is reported and stops no other one.
    """
    operations, registry, events = runtime.recurring, runtime.registry, runtime.events
    declared = _by_name([make() for make in registry.schedules])
    known = {schedule.name: schedule for schedule in operations.table.declared()}
    for definition in declared.values():
        store = partial(_store, operations, definition, known.get(definition.name))
        events.attempt("recurring", definition.name, store)
    for schedule in known.values():
        if schedule.name not in declared:
            remove = partial(_remove, operations, schedule, registry, runtime.celery.tasks)
            events.attempt("recurring", schedule.name, remove)


def _by_name(definitions: Sequence[Definition]) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for each in definitions:
        if found.setdefault(each.name, each) != each:
            raise ConfigError(
                f"code declares the recurring schedule {each.name!r} twice, so no declaration is "
                "stored: give one of them another name="
            )
    return found


def _store(
    operations: RecurringOperations, definition: Definition, known: RecurringSchedule | None
) -> None:
    new = operations.checked(definition)
    if known is None or not is_same_definition(known, new):
        operations.put(new, is_declared=True)


def _remove(
    operations: RecurringOperations,
    known: RecurringSchedule,
    registry: Registry,
    celery_tasks: Container[str],
) -> None:
    """Remove a schedule that is no longer declared, if this process has the code of its tasks."""
    if not is_known(known, registry, celery_tasks):
        return
    try:
        operations.remove(known.name, None, None)
    except RecurringNotFoundError:
        pass  # another worker has removed it
