"""The stage of the sweep for recurring schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from delaytasks.core.settings import Settings
from delaytasks.maintenance.overdue_queues import OnStep

if TYPE_CHECKING:
    from delaytasks.storage.due_schedules import DueSchedules

#: The horizon of a deployment that sends all tasks to the broker.
NO_HORIZON_S = 30.0


class RecurringStage:
    """Asks whether a schedule is due, and loads the package that makes its tasks only then.

    Parameters
    ----------
    settings
        They determine how far ahead tasks are made.
    due
        Asks the database.
    load
        Imports the package and returns the function that makes the tasks.
    """

    def __init__(
        self, settings: Settings, due: DueSchedules, load: Callable[[], Callable[[OnStep], None]]
    ) -> None:
        self._lead_s = lead_s(settings)
        self._due = due
        self._load = load

    def run(self, on_step: OnStep) -> None:
        if self._due.exist(self._lead_s):
            self._load()(on_step)


def lead_s(settings: Settings) -> float:
    """Return how long before an occurrence its task is made.

    The task must be in the table before a sweep arms the rows of that time, also if beat is silent
    and a sweep is late.
    """
    horizon_s = NO_HORIZON_S if settings.horizon_s is None else settings.horizon_s
    return horizon_s + settings.self_sweep_s + settings.sweep_s
