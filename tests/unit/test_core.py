"""Values and rules: ids, text, moves, lost workers and the reasons of failures."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delaytasks import OutcomeUnknownError, StoreError, StoreUnavailableError
from delaytasks.cli.output import parse_instant, show_from_now, show_instant
from delaytasks.core import inputs
from delaytasks.core.ids import COUNTER_BITS, EPOCH_MS, MAX_ID, SHARD_BITS, IdMaker, check_id
from delaytasks.core.inputs import check_delay, parse_duration, show_duration
from delaytasks.core.states import MOVES, SettlingMove, Status
from delaytasks.core.text import one_line, storable
from delaytasks.execution.runner import FailureReason
from tests.refusals import invalid

# -- values and rules: ids, text and moves --------------------------------------------------------


def test_ids_grow_with_time_and_carry_their_shard() -> None:
    now = EPOCH_MS + 1000
    make = IdMaker(lambda: now, shard=21)
    first = make()
    assert first >> (SHARD_BITS + COUNTER_BITS) == 1000
    assert first >> COUNTER_BITS & (2**SHARD_BITS - 1) == 21
    now += 1
    assert make() > first


def test_ids_have_63_bits_for_69_years() -> None:
    last = IdMaker(lambda: EPOCH_MS + 2**41 - 1, shard=2**SHARD_BITS - 1)()
    assert 2**62 < last <= MAX_ID
    assert timedelta(milliseconds=2**41) > timedelta(days=69 * 365)


def test_ids_of_one_millisecond_are_all_different() -> None:
    make = IdMaker(lambda: EPOCH_MS)
    ids = [make() for _ in range(2**COUNTER_BITS)]
    assert len(set(ids)) == len(ids)
    # The counter starts at a random value and does not overflow.
    assert all(0 <= id < 2**COUNTER_BITS for id in ids)


def test_ids_of_many_threads_are_all_different() -> None:
    start = threading.Barrier(8)

    def some(make: IdMaker) -> list[int]:
        start.wait()
        return [make() for _ in range(500)]

    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):  # The first ids of each IdMaker must differ, too.
            ids = [id for made in pool.map(some, [IdMaker(lambda: EPOCH_MS)] * 8) for id in made]
            assert len(set(ids)) == 4000


_shared = IdMaker(lambda: EPOCH_MS)


def _make_some(_: int) -> list[int]:
    return [_shared() for _ in range(100)]


def test_a_forked_child_makes_other_ids_than_its_parent() -> None:
    _shared()
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        shares = pool.map(_make_some, range(4), chunksize=1)
        pool.close()
        pool.join()  # a new child that the pool terminates at once may hang
    shares.append(_make_some(0))
    starts = {share[0] for share in shares}
    # Each share starts at a random value below 131,072. All five start at the same value only once
    # in 10^20 runs.
    assert len(starts) > 1
    assert all(b - a == 1 or b == 0 for share in shares for a, b in itertools.pairwise(share))


@pytest.mark.parametrize("given", [1, MAX_ID, "17", str(MAX_ID)])
def test_an_id_may_be_an_integer_or_its_decimal_text(given: Any) -> None:
    assert check_id(given) == int(given)


@pytest.mark.parametrize(
    "given",
    [0, -1, 2**63, 2**64, True, 1.0, "1 OR 1=1", "", "-1", " 1", "٣", None, b"1", [1], "9" * 20],
)
def test_an_invalid_id_is_refused(given: Any) -> None:
    with invalid("id", match="1 to 2\\^63 - 1"):
        check_id(given)


# -- text ----------------------------------------------------------------------------------------


def test_nul_and_lone_surrogates_are_replaced() -> None:
    assert storable("a\x00b\ud800c\udfffd", 100) == "a\ufffdb\ufffdc\ufffdd"
    storable("\ud83d", 100).encode()


@pytest.mark.parametrize("character", ["a", "é", "…", "😀", "\x00"])
@pytest.mark.parametrize("limit", [64, 100, 1000, 65_536])
def test_long_text_is_cut_in_the_middle_and_keeps_its_end(character: str, limit: int) -> None:
    cut = storable(character * limit * 2 + "the end", limit)
    assert len(cut.encode()) <= limit
    assert "characters left out" in cut
    if limit > 64:
        assert cut.endswith("the end")


def test_one_line_escapes_line_breaks() -> None:
    shown = one_line("a\r\nINFO forged \x1b[31m\u2028" + "x" * 500, 60)
    assert shown.isprintable()
    assert "\\r\\n" in shown
    assert shown.endswith("…")


# -- moves ---------------------------------------------------------------------------------------


def test_the_contracts_statuses_keep_their_numbers() -> None:
    numbers = {"NOT_COMPLETE": 0, "DONE": 1, "FAILED": 2, "RUNNING": 3, "CANCELLED": 4, "HELD": 5}
    assert {status.name: status.value for status in Status} == numbers


def test_a_status_is_shown_by_its_name_and_written_into_sql_as_its_number() -> None:
    assert f"{Status.DONE} {Status.DONE!s} {Status.DONE:d}" == "DONE DONE 1"


def test_the_settling_moves_are_the_moves_with_an_ending() -> None:
    settling = {name for name, move in MOVES.items() if move.ending is not None}
    assert settling == set(get_args(SettlingMove))


# -- the reasons for which chunks fail ------------------------------------------------------------


REASONS = [
    (StoreUnavailableError("the database cannot be reached"), FailureReason.UNAVAILABLE),
    (OutcomeUnknownError("the connection broke before the answer"), FailureReason.UNAVAILABLE),
    (StoreError("the tables are missing"), FailureReason.REFUSED),
    (KeyError("a bug, or a row that cannot be read"), FailureReason.UNKNOWN),
]


@pytest.mark.parametrize(("error", "reason"), REASONS)
def test_only_an_absent_database_is_unavailable(error: Exception, reason: FailureReason) -> None:
    assert FailureReason.of(error) is reason


# -- test_durations -------------------------------------------------------------------------------


NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)


DURATIONS: dict[str, float] = {"90": 90, "0": 0, "0.5": 0.5, "1h30m": 5400, "1h 30m": 5400}
DURATIONS |= {" 2d ": 172_800, "1w": 604_800, "500ms": 0.5, "1.5h": 5400, "1H30M": 5400}
DURATIONS |= {"1m500ms": 60.5, "1w2d3h4m5s6ms": 788_645.006}


@pytest.mark.parametrize(("text", "seconds"), DURATIONS.items())
def test_a_duration_is_read_as_people_write_it(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


INVALID = ["", " ", "x", "1x", "h", "30m1h", "1h1h", "1e9", "nan", "inf", "1,5", "1h30", "٣"]
REFUSED = [
    *((text, "1h30m") for text in (*INVALID, "1m s", "0x10", "1 2")),
    *((text, "not negative") for text in ("-5", "-1h", " -0.1")),
    *((text, "longer") for text in ("9" * 30, "9" * 400, "9" * 30 + "w")),
]


@pytest.mark.parametrize(("text", "said"), REFUSED)
def test_an_invalid_negative_or_endless_duration_is_refused(text: str, said: str) -> None:
    with invalid("delay", match=said):
        parse_duration(text)


@pytest.mark.parametrize(
    "text", ["2030-01-31T12:00:00Z", "2030-01-31 12:00z", "2030-01-31T13:00:00+01:00"]
)
def test_an_instant_is_read_with_its_zone(text: str) -> None:
    assert parse_instant(text) == NOON


def test_an_instant_without_a_zone_is_refused() -> None:
    with invalid("at", match="Z for UTC"):
        parse_instant("2030-01-31T12:00:00")


@pytest.mark.parametrize("text", ["", "tomorrow", "2030-02-31T00:00:00Z", "Z"])
def test_an_invalid_instant_is_refused_with_an_example(text: str) -> None:
    with invalid("at", match="2030-01-31T18:00:00Z"):
        parse_instant(text)


SHOWN = {0: "0s", 0.0123: "12ms", 5.2: "5s", 59.9: "1m", 5400: "1h30m", 3605: "1h"}
SHOWN |= {172_800: "2d", -90: "1m30s"}


@pytest.mark.parametrize(("seconds", "shown"), SHOWN.items())
def test_a_duration_is_shown_by_its_two_largest_units(seconds: float, shown: str) -> None:
    assert show_duration(seconds) == shown


@given(st.integers(0, 10**9))
def test_a_shown_duration_can_be_typed_again(seconds: int) -> None:
    again = parse_duration(show_duration(seconds)).total_seconds()
    # The omitted rest is less than one of the second unit. For example, 1w omits less than a day.
    assert again <= seconds <= again * 8 / 7


def test_an_instant_is_shown_so_that_it_can_be_typed_again() -> None:
    assert show_instant(NOON) == "2030-01-31T12:00:00Z"
    assert parse_instant(show_instant(NOON)) == NOON


def test_the_past_and_the_future_are_distinguished() -> None:
    assert show_from_now(NOON + timedelta(minutes=90), NOON) == "in 1h30m"
    assert show_from_now(NOON - timedelta(seconds=5), NOON) == "5s ago"


@pytest.mark.parametrize(
    ("delay", "seconds"), [("30m", 1800), ("1h 30m", 5400), (" 500ms ", 0.5), ("0s", 0), (90, 90)]
)
def test_a_delay_is_seconds_or_text_with_units(delay: str | float, seconds: float) -> None:
    assert check_delay(delay, 1e6) == timedelta(seconds=seconds)


def test_a_negative_timedelta_is_shown_in_seconds() -> None:
    with invalid("delay", match="not -5 s"):
        check_delay(timedelta(seconds=-5), 1e6)


@pytest.mark.parametrize("delay", ["5", " 5.0 ", "1e3", "", "-5", "-5m", "soon", "10m1h"])
def test_a_delay_without_a_unit_or_of_another_form_is_refused(delay: str) -> None:
    with invalid("delay"):
        check_delay(delay, 1e6)


@pytest.mark.parametrize(
    ("shift", "seconds"), [("1h", 3600), ("-1h30m", -5400), (" - 5s", -5), (-60, -60)]
)
def test_a_shift_has_a_sign(shift: str | float, seconds: float) -> None:
    assert inputs.check_shift(shift, 1e6) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0, "0"), (0.0123, "12ms"), (1.5, "1.5s"), (90, "1m30s")]
)
def test_a_measured_duration_is_shown_to_the_millisecond(seconds: float | None, text: str) -> None:
    assert inputs.show_measured(seconds) == text


TIMINGS = {"every 10": "every 10s", "every 300": "every 5m", "every forged": "every forged"}


@pytest.mark.parametrize(("timing", "text"), [*TIMINGS.items(), ("0 9 * * *", "0 9 * * *")])
def test_an_interval_of_a_schedule_is_shown_with_its_unit(timing: str, text: str) -> None:
    assert inputs.show_timing(timing) == text
