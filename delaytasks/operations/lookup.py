"""Reads tasks and their failed attempts, and finds the task that a call names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from delaytasks.core.attempt import Attempt
from delaytasks.core.errors import InvalidScheduleError, TaskNotFoundError
from delaytasks.core.filters import Filters, filter_of
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import check_key, check_page_limit, check_tag
from delaytasks.core.interfaces import CallerConnection, connection_of
from delaytasks.core.page import Page
from delaytasks.core.task import DelayTask, id_of
from delaytasks.core.text import shown

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime
    from delaytasks.storage.store import Store

#: A task that was read, an id, or a tag and a key.
TaskReference = DelayTask | int | tuple[str, str]


def name_of(task: object, tag: str | None, key: str | None) -> TaskReference:
    """Return the checked name that the arguments of a call give."""
    if (task is None) == (key is None) or (key is not None and tag is None):
        raise InvalidScheduleError("name the task by its id, or by tag= and key=")
    return (check_tag(tag), check_key(key)) if task is None else id_or_task(task)


def id_or_task(task: object) -> int | DelayTask:
    """Return `task` itself if it was read, else the id, checked."""
    return task if isinstance(task, DelayTask) else check_id(task)


def find_id(store: Store, name: TaskReference, on: CallerConnection | None) -> int:
    """Return the id of the task that a call names; look a key up."""
    if not isinstance(name, tuple):
        return id_of(name)
    tag, key = name
    id = store.tasks.id_of_key(tag, key, on)
    if id is None:
        raise TaskNotFoundError(f"no live task of tag {shown(tag)} has the key {shown(key)}")
    return id


class Lookup:
    def __init__(self, runtime: Runtime) -> None:
        self._store = runtime.store
        self._transactions = runtime.transactions

    def get(self, task: object, tag: str | None, key: str | None, session: Any) -> DelayTask:
        name = name_of(task, tag, key)
        with self._transactions.guard(session) as transaction:
            on = connection_of(transaction)
            return self._store.tasks.read(find_id(self._store, name, on), on)

    def attempts(self, task: object, session: Any) -> list[Attempt]:
        name = name_of(task, None, None)
        with self._transactions.guard(session) as transaction:
            on = connection_of(transaction)
            return self._store.tasks.attempts(find_id(self._store, name, on), on)

    def find(
        self,
        filters: Filters,
        cursor: str | None,
        limit: int,
        newest_first: bool,
        session: Any,
        time_limit_s: float | None = None,
    ) -> Page:
        """Return a page of tasks. Without a session, `time_limit_s` may limit the search."""
        check_page_limit(limit)
        where = filter_of(filters)
        with self._transactions.guard(session) as transaction:
            on = connection_of(transaction)
            return self._store.tasks.find(where, limit, cursor, on, newest_first, time_limit_s)
