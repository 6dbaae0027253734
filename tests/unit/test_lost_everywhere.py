"""A worker is lost if it reports to none of the databases."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from delaytasks.core.workers import LostWorker, lost_everywhere

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


def lost(name: str, minute: int) -> LostWorker:
    at = NOON + timedelta(minutes=minute)
    return LostWorker(name, at, at - timedelta(minutes=3), "prefork", 2, ["default"])


def test_the_latest_loss_comes_first_and_the_first_database_decides_when_it_was() -> None:
    found = [lost("early", 1), lost("late", 5), lost("early", 9)]
    assert lost_everywhere(found, ()) == [lost("late", 5), lost("early", 1)]


def test_a_worker_that_reports_to_another_database_is_not_lost() -> None:
    assert lost_everywhere([lost("w1", 1), lost("w2", 2)], {"w2"}) == [lost("w1", 1)]
