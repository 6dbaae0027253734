"""The recurring schedules of a play, and the part of a simulated sweep that makes their tasks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from chaos.history import Occurrences
from chaos.occurrences import read_occurrences
from chaos.simulation.hazards import StepProxy
from chaos.simulation.stage import Play
from delaytasks.events import Events
from delaytasks.model.clock import Clock, from_us, to_us
from delaytasks.model.task import Timer
from delaytasks.recurring.creation import RecurringTable, create
from delaytasks.recurring.definition import RecurringSchedule

#: The share of plays with a recurring schedule, whose tasks are made up to 46 s ahead.
SHARE = 0.1
INTERVALS_S = (4, 7, 20)


class _Transactions(StepProxy):
    """Makes a step of each transaction of a table, which other actors cannot interrupt."""

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name == "transaction" else getattr(self._part, name)


def recurring_stage(play: Play, clock: Clock, timer: Timer, events: Events) -> Callable[[], None]:
    """Return the stage of a worker's sweep."""
    store = play.stage.store
    table: Any = _Transactions(
        RecurringTable(store.database, store.schema), play.world, play.hazards
    )
    runtime: Any = SimpleNamespace(
        settings=play.settings,
        recurring_table=table,
        new_id=play.new_id,
        clock=clock,
        timer=timer,
        events=events,
    )

    def make() -> None:
        if play.sweeps.has_due_schedule(play.settings.recurring_lead_s):
            create(runtime)

    return make


class SimulatedSchedules:
    """The schedules of a play. No fault hits the calls that define and pause them."""

    def __init__(self, play: Play) -> None:
        self._play = play
        self._table = RecurringTable(play.stage.store.database, play.stage.store.schema)
        # With a sequence of its own, so that the other draws of a seed do not depend on it.
        self._chance = random.Random(f"recurring {play.seed}")
        self._schedules: list[RecurringSchedule] = []
        #: Until when each of the schedules was watched.
        self._until_us: dict[str, int] = {}

    def begin(self) -> None:
        if self._chance.random() < SHARE:
            made = self._schedule()
            self._schedules.append(made)
            self._table.transaction(lambda on: self._table.insert(on, made))

    def end(self) -> None:
        """Pause all schedules. Their tasks that were made ahead run."""
        for schedule in self._schedules:
            known = self._table.find(schedule.name)
            assert known is not None
            assert known.next_at is not None
            self._until_us[schedule.name] = min(self._play.times.now_us, to_us(known.next_at) - 1)
            changes = {"is_paused": True, "next_at": None}
            self._table.transaction(
                lambda on, known=known, changes=changes: self._table.update(on, known, changes)  # type: ignore[misc]
            )

    def read(self) -> None:
        """Add the occurrences to the history of the play."""
        history = self._play.history
        found = read_occurrences(history, self._play.rows())
        for schedule in self._schedules:
            assert schedule.next_at is not None
            history.occurrences.append(
                Occurrences(
                    schedule.name,
                    int(schedule.timing.split()[1]) * 1_000_000,
                    to_us(schedule.next_at),
                    self._until_us[schedule.name],
                    found.get(schedule.name, []),
                    "all" if schedule.missed == "all" else "latest",
                    schedule.overlap,
                )
            )

    def _schedule(self) -> RecurringSchedule:
        chance, now_us = self._chance, self._play.times.now_us
        start_us = now_us // 1_000_000 * 1_000_000
        every_s = chance.choice(INTERVALS_S)
        body = {"s": chance.choice([0, 0.3, 8]), "fails": 0, "kills": 0}
        return RecurringSchedule(
            name="schedule",
            tag="note",
            body_json=json.dumps(body),
            queue="default",
            priority=0,
            headers_json=None,
            meta_json=None,
            limit_key=None,
            timing=f"every {every_s}",
            tz="UTC",
            start_at=from_us(start_us),
            jitter_s=0,
            missed=chance.choice(["all", "latest"]),
            overlap=chance.choice(["allow", "skip"]),
            next_at=from_us(start_us + every_s * 1_000_000),
            create_time=from_us(now_us),
            update_time=from_us(now_us),
            updated_by="the simulation",
            id=self._play.new_id(),
        )
