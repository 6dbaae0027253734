"""The result of `touch` and `touch_many`."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Generic, TypeVar

IdOrKey = TypeVar("IdOrKey", int, str)


@dataclass(frozen=True, slots=True)
class TouchResult(Generic[IdOrKey]):
    """The result of `touch` and `touch_many`: true if all tasks still wait.

    Attributes
    ----------
    touched
        The ids, or the keys, of the tasks that wait at least as long as the call asked for.
    gone
        The ids, or the keys, of the tasks that no longer wait or do not exist.

    Examples
    --------
    >>> delays.touch_many(tag="device.offline", keys=["d-17", "d-18"], delay=90).gone
    ['d-18']
    """

    touched: list[IdOrKey]
    gone: list[IdOrKey]

    def __bool__(self) -> bool:
        return not self.gone

    @classmethod
    def of(cls, names: Iterable[IdOrKey], waiting: Set[IdOrKey]) -> TouchResult[IdOrKey]:
        """Sort the names, without repetitions, by whether their tasks wait."""
        distinct = dict.fromkeys(names)
        return cls(
            [name for name in distinct if name in waiting],
            [name for name in distinct if name not in waiting],
        )
