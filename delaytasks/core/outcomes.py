"""Outcomes: values that a processor returns to say how its task ends or continues.

An outcome leads to a move, which changes the status of the row: see `core/states.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from delaytasks.core.durations import Delay


@dataclass(frozen=True, slots=True)
class Done:
    """The task is DONE. Any other return value means the same, without a result to keep.

    Parameters
    ----------
    result
        A JSON value, which is stored if the processor was registered with `keep_result=True`.

    Examples
    --------
    >>> return Done({"receipt": 7})
    """

    result: Any = None


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed, and the task runs again; after its last retry it is FAILED.

    Parameters
    ----------
    after
        The time until the next attempt: seconds, text such as `"5m"`, or a timedelta. By default
        the next delay of the retry schedule.
    reason
        The text that is stored as the error of the attempt.

    Examples
    --------
    >>> return Retry(after="5m", reason="the partner is busy")
    """

    after: Delay | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Snooze:
    """The task runs again after `after`. This run does not count as an attempt.

    Parameters
    ----------
    after
        Seconds, text such as `"5m"`, or a timedelta.

    Examples
    --------
    >>> return Snooze("1h")
    """

    after: Delay


@dataclass(frozen=True, slots=True)
class Cancel:
    """The task is CANCELLED, because its work is no longer needed.

    Parameters
    ----------
    reason
        The text that is stored as the error of the task.

    Examples
    --------
    >>> return Cancel("the order was paid")
    """

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """The task is FAILED, even if its retry schedule has retries left.

    Parameters
    ----------
    reason
        The text that is stored as the error of the task.

    Examples
    --------
    >>> return Fail("there is no such order")
    """

    reason: str = ""


Outcome = Done | Retry | Snooze | Cancel | Fail
