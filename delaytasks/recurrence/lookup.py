"""Finds recurring schedules, each in the database that has it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from delaytasks.core.errors import RecurringNotFoundError
from delaytasks.core.ids import home_of
from delaytasks.core.inputs import check_page_limit, check_schedule_name, check_tag
from delaytasks.recurrence.queries import RecurringTable
from delaytasks.recurrence.schedule import RecurringSchedule

if TYPE_CHECKING:
    from delaytasks.routing.shard import Shard
    from delaytasks.sharding.router import Router

#: The home of a schedule is that of a key with this tag.
HOME_TAG = "delaytasks.recurring"


class RecurringLookup:
    """Reads the schedules of all databases."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._tables: dict[int, RecurringTable] = {}

    def get(self, name: str) -> RecurringSchedule:
        _, found = self.locate(check_schedule_name(name))
        if found is None:
            raise RecurringNotFoundError(
                f"there is no recurring schedule {name!r}; `delaytasks recurring list` shows all"
            )
        return found

    def list(
        self, tag: str | None, prefix: str | None, after: str | None, limit: int
    ) -> list[RecurringSchedule]:
        check_page_limit(limit)
        checked = None if tag is None else check_tag(tag)
        pages = [table.page(checked, prefix, after, limit) for table in self.tables()]
        return [*islice(merge(*pages, key=attrgetter("name")), limit)]

    def declared(self) -> Sequence[RecurringSchedule]:
        return [schedule for table in self.tables() for schedule in table.declared()]

    def next(self, name: str, count: int, after: datetime | None) -> Sequence[datetime]:
        return self.get(name).next(count, after or self._router.shards[0].clock.certain_now())

    def tables(self) -> Sequence[RecurringTable]:
        return [self.table(shard) for shard in self._router.shards]

    def table(self, shard: Shard) -> RecurringTable:
        if shard.number not in self._tables:
            store = shard.store
            self._tables[shard.number] = RecurringTable(store.database, store.schema)
        return self._tables[shard.number]

    def locate(self, name: str) -> tuple[Shard, RecurringSchedule | None]:
        """Return the shard that has the schedule, and the schedule; for a new name, its home.

        A schedule stays in its database when databases are added, so all are asked.
        """
        shards = self._router.shards
        home = home_of(HOME_TAG, name, len(shards))
        for shard in [shards[home], *shards[:home], *shards[home + 1 :]]:
            found = self.table(shard).find(name)
            if found is not None:
                return shard, found
        return shards[home], None
