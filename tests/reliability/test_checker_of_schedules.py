"""The checker finds each way in which a recurring schedule may break its promises."""

from __future__ import annotations

from typing import Literal

import pytest

from chaos.checker import Checker
from chaos.history import History, Occurrence, Occurrences

NOW = 1_700_000_000_000_000
S = 1_000_000
#: The occurrences of each schedule: five, one in each second.
FIRST, LAST = NOW + S, NOW + 5 * S


def found(
    *occurrences: Occurrence,
    missed: Literal["all", "latest"] = "all",
    overlap: Literal["allow", "skip"] = "allow",
) -> set[str]:
    some = Occurrences("report", S, FIRST, LAST, list(occurrences), missed, overlap)
    return set(Checker(History(occurrences=[some])).verdict().counts())


def ahead(*seconds: float) -> list[Occurrence]:
    """Occurrences whose tasks were made ten seconds before, and ended a moment after."""
    return tasks(*((s, s - 10, s + 0.001) for s in seconds))


@pytest.mark.parametrize("missed", ["all", "latest"])
@pytest.mark.parametrize(
    ("seconds", "kinds"),
    [
        ([1, 2, 3, 4, 5], set()),
        ([1, 2, 3, 4, 5, 6], set()),
        ([1, 2, 2, 3, 4, 5], {"repeated"}),
        ([1, 2, 4, 5], {"left out"}),
        ([2, 3, 4, 5], {"left out"}),
        ([1, 2, 3, 4], {"left out"}),
        ([1, 2, 3, 3.5, 4, 5], {"unexpected"}),
        ([], {"left out"}),
    ],
)
def test_each_occurrence_has_exactly_one_task(
    seconds: list[float], kinds: set[str], missed: Literal["all", "latest"]
) -> None:
    assert found(*ahead(*seconds), missed=missed) == kinds


@pytest.mark.parametrize(("missed", "kinds"), [("all", {"left out"}), ("latest", set())])
def test_after_an_outage_only_the_latest_occurrence_may_have_a_task(
    missed: Literal["all", "latest"], kinds: set[str]
) -> None:
    """No sweep takes place from the second occurrence until after the fourth one."""
    late = Occurrence(NOW + 4 * S, NOW + 4 * S + S // 2, NOW + 4 * S + S // 2)
    assert found(*ahead(1), late, *ahead(5), missed=missed) == kinds


def test_the_latest_occurrence_of_an_outage_has_a_task() -> None:
    """The fourth occurrence has passed when the fifth gets its task before its time."""
    made_us = NOW + 4 * S + S // 2
    assert found(*ahead(1, 2, 3), Occurrence(NOW + 5 * S, made_us), missed="latest") == {"left out"}


def tasks(*times: tuple[float, float, float]) -> list[Occurrence]:
    """Occurrences, when their tasks were made, and when these ended."""
    return [Occurrence(*(int(NOW + s * S) for s in each)) for each in times]


def test_an_occurrence_is_skipped_while_the_task_before_it_runs() -> None:
    some = tasks((1, 0, 1.5), (2, 1.6, 3.7), (4, 3.8, 4.5), (5, 4.6, 5.1))
    assert found(*some, missed="latest", overlap="skip") == set()
    assert found(*some, missed="latest") == {"left out"}


def test_an_occurrence_is_not_skipped_after_the_task_before_it_has_ended() -> None:
    some = tasks((1, 0, 1.5), (2, 1.6, 2.2), (4, 2.3, 4.5), (5, 4.6, 5.1))
    assert found(*some, missed="latest", overlap="skip") == {"left out"}


def test_tasks_of_a_schedule_without_overlap_do_not_wait_for_each_other() -> None:
    some = tasks((1, 0, 1.5), (2, 1.4, 2.2), (3, 2.3, 3.1), (4, 3.2, 4.1), (5, 4.2, 5.1))
    assert found(*some, missed="latest", overlap="skip") == {"overlapped"}
