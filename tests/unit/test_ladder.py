"""Ladders: rungs, their text, and which one an error climbs."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaytasks.core.errors import InvalidInputError, InvalidLadderError
from delaytasks.core.ladder import LEVELS, MAX_RUNGS, NOTIFY, Ladder, Retries, ladder_of


def test_a_ladder_is_written_as_people_say_it() -> None:
    ladder = Ladder("15s 3m 1h30m")
    assert ladder.rungs_s == (15, 180, 5400)
    assert ladder == Ladder([15, "3m", timedelta(minutes=90)])


def test_a_ladder_of_n_rungs_has_n_waits() -> None:
    ladder = Ladder("1s 2s")
    assert [ladder.wait_s(failures) for failures in (1, 2, 3, 4)] == [1, 2, None, None]
    assert [ladder.has_rung(failures) for failures in (1, 2, 3)] == [True, True, False]


def test_the_ladders_of_the_source_designs_are_there() -> None:
    assert LEVELS.rungs_s == (5, 30, 60, 600, 1800, 3600, 21600, 86400, 172800)
    assert NOTIFY.rungs_s == (15, 180, 600, 1800, 1800, 3600, 7200, 21600, 54000)


def test_exponential_waits_grow_to_their_cap() -> None:
    assert Ladder.exponential("1s", times=6, cap="10s", jitter=0).rungs_s == (1, 2, 4, 8, 10, 10)
    assert Ladder.fixed("5s", times=3).rungs_s == (5, 5, 5)


@given(st.floats(0, 1), st.integers(1, 9))
def test_jitter_stays_within_its_share(jitter: float, failures: int) -> None:
    wait = Ladder(NOTIFY.rungs_s, jitter=jitter).wait_s(failures)
    rung = NOTIFY.rungs_s[failures - 1]
    assert wait is not None
    assert rung * (1 - jitter) - 1e-6 <= wait <= rung * (1 + jitter) + 1e-6


def test_jitter_keeps_apart_what_failed_together() -> None:
    ladder = Ladder("1h", jitter=0.5)
    assert len({ladder.wait_s(1) for _ in range(20)}) > 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: Ladder(""),
        lambda: Ladder("soon"),
        lambda: Ladder("-5s"),
        lambda: Ladder([float("nan")]),
        lambda: Ladder([True]),
        lambda: Ladder([1] * (MAX_RUNGS + 1)),
        lambda: Ladder("1s", jitter=2),
        lambda: Ladder.fixed("1s", times=0),
        lambda: Ladder.exponential("1s", times=2, factor=0.5),
        lambda: Ladder.exponential("1s", times=2, cap="400d"),
        lambda: Retries.of({"ValueError": "1s"}),  # type: ignore[dict-item]
        lambda: Retries.of({ValueError: "soon"}),
    ],
)
def test_what_is_no_ladder_is_refused(make: Any) -> None:
    with pytest.raises(InvalidInputError):
        make()


def test_a_number_of_retries_has_the_default_delays() -> None:
    assert ladder_of(3) == Ladder("5s 30s 1m")
    assert ladder_of(11) == Ladder("5s 30s 1m 10m 30m 1h 6h 1d 2d 2d 2d")
    assert Retries.of(1).ladder_for(ValueError) == Ladder("5s")
    assert Retries.of({OSError: 2, Exception: None}).ladder_for(ConnectionError) == Ladder("5s 30s")


@pytest.mark.parametrize("retry", [True, False, 0, -1, 1.5, MAX_RUNGS + 1, object(), b"15s"])
def test_what_is_no_number_of_retries_is_refused_with_the_remedy(retry: Any) -> None:
    for make in (lambda: Retries.of(retry), lambda: Retries.of({ValueError: retry})):
        with pytest.raises(InvalidLadderError, match="15s 3m"):
            make()
    with pytest.raises(InvalidLadderError, match="15s 3m"):
        Ladder(retry)


def test_the_nearest_class_of_an_error_says_its_ladder() -> None:
    retries = Retries.of({OSError: "1s", ConnectionError: "2s", ValueError: None, Exception: NOTIFY})
    assert retries.ladder_for(ConnectionResetError) == Ladder("2s")
    assert retries.ladder_for(FileNotFoundError) == Ladder("1s")
    assert retries.ladder_for(UnicodeDecodeError) is None
    assert retries.ladder_for(KeyError) is NOTIFY
    assert retries.ladder_for(SystemExit) is None


def test_a_tasks_own_ladder_does_not_retry_what_its_tag_never_does() -> None:
    retries, own = Retries.of({ValueError: None, Exception: "1s"}), Ladder("9s")
    assert retries.ladder_for(KeyError, own) is own
    assert retries.ladder_for(ValueError, own) is None
    assert Retries.of(None).ladder_for(KeyError, own) is own
