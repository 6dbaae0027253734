"""The pause sweeper holds rows in steps, counts those that the store held, and repeats a walk."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from delaytasks.core.events import Events
from delaytasks.core.interfaces import Entry, FoundRow, Level
from delaytasks.core.policies import Policies, Policy
from delaytasks.core.states import Status
from delaytasks.maintenance.sweeper import PauseSweeper
from tests.conftest import settings_for
from tests.recording import ManualClock, RecordingTimer

NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)


class Rows:
    """Waiting or held rows in memory. Each step moves at most `most` of the rows."""

    def __init__(self, status: Status, ids: Sequence[int], most: int) -> None:
        self.statuses = dict.fromkeys(ids, status)
        self.most = most

    def levels(self, status: Status, after: str | None) -> tuple[list[Level], None]:
        return [Level("default", 0)], None

    def look(
        self, status: Status, level: Level, since: datetime | None, until: datetime | None
    ) -> list[FoundRow]:
        rows = [FoundRow(id, "mail", NOON + timedelta(seconds=id)) for id in self._of(status)]
        return [row for row in rows if since is None or row.due > since]

    def due_at(self, status: Status, level: Level, due: datetime, after: int) -> list[FoundRow]:
        return []

    def due_between(self, since: datetime, until: datetime) -> list[int]:
        return self._of(Status.NOT_COMPLETE)

    def hold(self, ids: Sequence[int]) -> int:
        return len(self._move(ids, Status.HELD))

    def release(self, ids: Sequence[int]) -> list[Entry]:
        return [Entry(id, 1, 0) for id in self._move(ids, Status.NOT_COMPLETE)]

    def _of(self, status: Status) -> list[int]:
        return [id for id, each in self.statuses.items() if each is status]

    def _move(self, ids: Sequence[int], status: Status) -> Sequence[int]:
        moved = ids[: self.most]
        self.statuses.update(dict.fromkeys(moved, status))
        return moved


class Field:
    def __init__(self, rows: Rows) -> None:
        self.rows, self.events, self.applied = rows, Events(), list[Policy]()
        table: Any = SimpleNamespace(
            applied=self.applied.extend, count=lambda _: {}, forget=lambda: 0
        )
        cache: Any = SimpleNamespace(refresh=Policies)
        holder: Any = rows
        settings, clock, timer = settings_for("sqlite://"), ManualClock(NOON), RecordingTimer()
        self.sweeper = PauseSweeper(settings, cache, table, holder, clock, timer, self.events)


def paused(is_paused: bool = True) -> Policies:
    return Policies((Policy("tag", "mail", is_paused=is_paused, version=1),))


@pytest.mark.parametrize("most", [0, 1])
def test_rows_whose_pause_ended_meanwhile_are_not_counted_as_held(most: int) -> None:
    field = Field(Rows(Status.NOT_COMPLETE, range(1, 4), most))
    field.rows.due_between = lambda since, until: [1, 2, 3]  # type: ignore[method-assign]
    beats: list[None] = []

    def beat() -> None:
        beats.append(None)
        field.rows.most = 0 if len(beats) > 1 else most  # the pause ends after the first step

    field.sweeper.hold_near(paused(), NOON, NOON + timedelta(seconds=30), beat)
    assert field.events.counts["task.held"] == most
    assert len(beats) == 1 + most, "a step that holds no row is the last one"


def test_a_walk_that_could_not_release_a_locked_row_is_repeated() -> None:
    field = Field(Rows(Status.HELD, range(1, 4), most=2))
    field.sweeper.walk(paused(is_paused=False), lambda: None)
    assert field.events.counts["task.released"] >= 2
    assert field.applied == [], "a row was locked"
    field.rows.most = 3
    field.sweeper.walk(paused(is_paused=False), lambda: None)
    assert set(field.rows.statuses.values()) == {Status.NOT_COMPLETE}
    assert [policy.name for policy in field.applied] == ["mail"]


def test_a_walk_holds_every_waiting_row_of_a_paused_tag() -> None:
    field = Field(Rows(Status.NOT_COMPLETE, range(1, 4), most=3))
    field.sweeper.walk(paused(), lambda: None)
    assert set(field.rows.statuses.values()) == {Status.HELD}
    assert field.events.counts["task.held"] == 3
    assert [policy.name for policy in field.applied] == ["mail"]
