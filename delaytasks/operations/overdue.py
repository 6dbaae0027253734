"""Groups the overdue tasks of a database, and explains why they have not begun."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from delaytasks.core.settings import Settings
from delaytasks.core.why import Reason, why_late
from delaytasks.storage.overdue_rows import OverdueRows
from delaytasks.storage.store import Store

#: The groups with the most tasks.
MAX_EXPLAINED_GROUPS = 20
#: Late tasks with these reasons need no operator.
_EXPECTED_CODES = ("due", "limit", "paused")


class ExplainedGroup(NamedTuple):
    """Overdue tasks of one queue and tag, and the reason why they have not begun."""

    queue: str
    tag: str
    tasks: int
    oldest: datetime
    #: The lateness of the oldest task.
    late_s: float
    reason: Reason

    @property
    def is_expected(self) -> bool:
        """Whether the tasks wait for their turn, and not for an operator."""
        return self.reason.code in _EXPECTED_CODES


def explain_overdue(
    store: Store, settings: Settings, limit: int = MAX_EXPLAINED_GROUPS
) -> list[ExplainedGroup]:
    """Return up to `limit` groups of overdue tasks, those with the most tasks first."""
    groups = OverdueRows(store.database, store.schema).groups(settings.grace_s, limit)
    if not groups:
        return []
    now = store.tasks.now()
    workers = store.workers.registered(now, settings.silent_s)
    return [
        ExplainedGroup(
            group.queue,
            group.tag,
            group.tasks,
            group.oldest,
            max((now - group.oldest).total_seconds(), 0.0),
            why_late(
                group,
                workers,
                store.policies.of(group.tag, group.queue),
                settings.namespace,
            ),
        )
        for group in groups
    ]
