"""Retry schedules: their retry delays, their text, and which schedule an error selects."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaytasks.core.errors import InvalidInputError, InvalidRetryScheduleError
from delaytasks.core.retry_schedule import (
    LEVELS,
    MAX_RETRY_DELAYS,
    NOTIFY,
    Retries,
    RetrySchedule,
    retry_schedule_of,
)


def test_a_retry_schedule_is_written_as_durations() -> None:
    retry_schedule = RetrySchedule("15s 3m 1h30m")
    assert retry_schedule.retry_delays_s == (15, 180, 5400)
    assert retry_schedule == RetrySchedule([15, "3m", timedelta(minutes=90)])


def test_a_retry_schedule_of_n_delays_has_n_waits() -> None:
    retry_schedule = RetrySchedule("1s 2s")
    assert [retry_schedule.wait_s(failures) for failures in (1, 2, 3, 4)] == [1, 2, None, None]
    assert [retry_schedule.has_retry_delay(failures) for failures in (1, 2, 3)] == [
        True,
        True,
        False,
    ]


def test_the_retry_schedules_of_the_source_designs_exist() -> None:
    assert LEVELS.retry_delays_s == (5, 30, 60, 600, 1800, 3600, 21600, 86400, 172800)
    assert NOTIFY.retry_delays_s == (15, 180, 600, 1800, 1800, 3600, 7200, 21600, 54000)


def test_exponential_waits_grow_to_their_cap() -> None:
    assert RetrySchedule.exponential("1s", times=6, cap="10s", jitter=0).retry_delays_s == (
        1,
        2,
        4,
        8,
        10,
        10,
    )
    assert RetrySchedule.fixed("5s", times=3).retry_delays_s == (5, 5, 5)


@given(st.floats(0, 1), st.integers(1, 9))
def test_jitter_stays_within_its_share(jitter: float, failures: int) -> None:
    wait = RetrySchedule(NOTIFY.retry_delays_s, jitter=jitter).wait_s(failures)
    retry_delay = NOTIFY.retry_delays_s[failures - 1]
    assert wait is not None
    assert retry_delay * (1 - jitter) - 1e-6 <= wait <= retry_delay * (1 + jitter) + 1e-6


def test_jitter_spreads_the_retries_of_tasks_that_failed_together() -> None:
    retry_schedule = RetrySchedule("1h", jitter=0.5)
    assert len({retry_schedule.wait_s(1) for _ in range(20)}) > 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetrySchedule(""),
        lambda: RetrySchedule("soon"),
        lambda: RetrySchedule("-5s"),
        lambda: RetrySchedule([float("nan")]),
        lambda: RetrySchedule([True]),
        lambda: RetrySchedule([1] * (MAX_RETRY_DELAYS + 1)),
        lambda: RetrySchedule("1s", jitter=2),
        lambda: RetrySchedule.fixed("1s", times=0),
        lambda: RetrySchedule.exponential("1s", times=2, factor=0.5),
        lambda: RetrySchedule.exponential("1s", times=2, cap="400d"),
        lambda: Retries.of({"ValueError": "1s"}),
        lambda: Retries.of({ValueError: "soon"}),
    ],
)
def test_an_invalid_retry_schedule_is_refused(make: Any) -> None:
    with pytest.raises(InvalidInputError):
        make()


def test_a_number_of_retries_has_the_default_delays() -> None:
    assert retry_schedule_of(3) == RetrySchedule("5s 30s 1m")
    assert retry_schedule_of(11) == RetrySchedule("5s 30s 1m 10m 30m 1h 6h 1d 2d 2d 2d")
    assert Retries.of(1).retry_schedule_for(ValueError) == RetrySchedule("5s")
    assert Retries.of({OSError: 2, Exception: None}).retry_schedule_for(
        ConnectionError
    ) == RetrySchedule("5s 30s")


@pytest.mark.parametrize("retry", [True, False, 0, -1, 1.5, MAX_RETRY_DELAYS + 1, object(), b"15s"])
def test_an_invalid_number_of_retries_is_refused_with_the_remedy(retry: Any) -> None:
    for make in (lambda: Retries.of(retry), lambda: Retries.of({ValueError: retry})):
        with pytest.raises(InvalidRetryScheduleError, match="15s 3m"):
            make()
    with pytest.raises(InvalidRetryScheduleError, match="15s 3m"):
        RetrySchedule(retry)


def test_the_nearest_class_of_an_error_selects_the_retry_schedule() -> None:
    retries = Retries.of(
        {OSError: "1s", ConnectionError: "2s", ValueError: None, Exception: NOTIFY}
    )
    assert retries.retry_schedule_for(ConnectionResetError) == RetrySchedule("2s")
    assert retries.retry_schedule_for(FileNotFoundError) == RetrySchedule("1s")
    assert retries.retry_schedule_for(UnicodeDecodeError) is None
    assert retries.retry_schedule_for(KeyError) is NOTIFY
    assert retries.retry_schedule_for(SystemExit) is None


def test_a_tasks_own_retry_schedule_does_not_retry_errors_that_its_tag_excludes() -> None:
    retries, own = Retries.of({ValueError: None, Exception: "1s"}), RetrySchedule("9s")
    assert retries.retry_schedule_for(KeyError, own) is own
    assert retries.retry_schedule_for(ValueError, own) is None
    assert Retries.of(None).retry_schedule_for(KeyError, own) is own
