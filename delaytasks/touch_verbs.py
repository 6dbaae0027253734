"""The verbs for timeouts that are pushed away again and again."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, overload

from delaytasks.core.errors import InvalidScheduleError
from delaytasks.core.inputs import check_key, check_tag
from delaytasks.core.task import DelayTask, id_of
from delaytasks.core.text import shown
from delaytasks.verbs import Verbs, checked, name_of


class TouchVerbs(Verbs):
    def touch(
        self,
        task: int | str | DelayTask | None = None,
        delay: float | timedelta | None = None,
        *,
        tag: str | None = None,
        key: str | None = None,
        session: Any = None,
    ) -> bool:
        """Pushes a timeout away: the task is due `delay` seconds from now, unless it is later already.

        One row update and no message, made for heartbeats. False if the task does not wait any more.
        """
        with self._guarded(session) as transaction:
            return self.routes.touch(name_of(task, tag, key), delay, transaction)

    @overload
    def touch_many(
        self,
        tasks: Iterable[int | str | DelayTask],
        delay: float | timedelta,
        *,
        session: Any = None,
    ) -> list[int]: ...

    @overload
    def touch_many(
        self, *, tag: str, keys: Iterable[str], delay: float | timedelta, session: Any = None
    ) -> list[str]: ...

    def touch_many(
        self,
        tasks: Iterable[int | str | DelayTask] | None = None,
        delay: float | timedelta | None = None,
        *,
        tag: str | None = None,
        keys: Iterable[str] | None = None,
        session: Any = None,
    ) -> list[int] | list[str]:
        """Pushes many timeouts away, and returns those that do not wait any more: ids, or keys if keys were given.

        As `touch`, a few thousand tasks in a statement. What is returned ran, or runs, or never was, which is no
        error: schedule it anew.
        """
        if (tasks is None) == (keys is None) or (tag is None) != (keys is None):
            raise InvalidScheduleError("give touch_many the tasks, or tag= and keys=")
        with self._guarded(session) as transaction:
            if keys is None:
                names = [checked(task) for task in _list(tasks)]
                waiting = self.routes.touch_many(names, delay, transaction)
                return [id for id in dict.fromkeys(map(id_of, names)) if id not in waiting]
            wanted = [check_key(key) for key in _list(keys)]
            touched = self.routes.touch_keys(check_tag(tag), wanted, delay, transaction)
            return [key for key in dict.fromkeys(wanted) if key not in touched]


def _list(items: Any) -> Iterable[Any]:
    if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
        raise InvalidScheduleError(
            f"touch_many takes a list of tasks or of keys, not {shown(items)}"
        )
    return items
