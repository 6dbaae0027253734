"""Values and rules: ids, text and moves."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, get_args

import pytest

from delaytasks.core.errors import InvalidIdError
from delaytasks.core.ids import COUNTER_BITS, EPOCH_MS, MAX_ID, SHARD_BITS, IdMaker, check_id
from delaytasks.core.states import FINISHED, LIVE, MOVES, SettlingMove, Status, moves_from
from delaytasks.core.text import one_line, storable, traceback_text


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
    with pytest.raises(InvalidIdError, match="1 to 2\\^63 - 1"):
        check_id(given)


# -- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "plain", "ünï 😀", "a\nb\tc", "x" * 1000])
def test_text_that_fits_is_stored_as_it_is(text: str) -> None:
    assert storable(text, 4096) == text


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


def _fails_deeply() -> None:
    raise ValueError("the reason \x00")


def test_a_traceback_is_whole_and_storable() -> None:
    with pytest.raises(ValueError, match="the reason") as caught:
        _fails_deeply()
    shown = traceback_text(caught.value, 4096)
    assert "_fails_deeply" in shown
    assert shown.rstrip().endswith("ValueError: the reason \ufffd")


def test_an_error_whose_str_fails_still_has_a_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert "Mute" in traceback_text(Mute(), 4096)


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
    assert f"{Status.DONE} {Status.DONE!s} {Status.DONE:d}" == "DONE DONE 1", (
        "on each version of Python"
    )


def test_every_status_is_reached_and_every_live_one_is_left() -> None:
    reached = {move.target for move in MOVES.values()}
    assert reached == set(Status)
    for status in LIVE:
        assert moves_from(status)
    assert moves_from(Status.DONE) == []


def test_the_moves_match_the_contract() -> None:
    waiting, done, failed, running, cancelled, held = Status
    assert {name: (set(move.sources), move.target) for name, move in MOVES.items()} == {
        "schedule": (set(), waiting),
        "claim": ({waiting}, running),
        "succeed": ({running}, done),
        "fail": ({running}, failed),
        "schedule_retry": ({running}, waiting),
        "snooze": ({running}, waiting),
        "withdraw": ({running}, cancelled),
        "expire": ({running}, cancelled),
        "give_back": ({running}, waiting),
        "hold_back": ({running}, held),
        "recover": ({running}, waiting),
        "fail_worker_lost": ({running}, failed),
        "hold": ({waiting}, held),
        "release": ({held}, waiting),
        "admit": ({held}, running),
        "cancel": ({waiting, held}, cancelled),
        "reschedule": ({waiting, held}, waiting),
        "replace": ({waiting, held}, waiting),
        "rerun": ({failed, cancelled}, waiting),
    }
    assert all(move.name == name for name, move in MOVES.items())


def test_the_settling_moves_are_the_moves_with_an_ending() -> None:
    settling = {name for name, move in MOVES.items() if move.ending is not None}
    assert settling == set(get_args(SettlingMove))


def test_only_an_operators_retry_leaves_a_finished_status() -> None:
    assert {name for status in FINISHED for name in moves_from(status)} == {"rerun"}
    assert not FINISHED & LIVE
    assert set(Status) == FINISHED | LIVE


def test_from_every_live_status_an_end_can_be_reached() -> None:
    for start in LIVE:
        seen, todo = set(), [start]
        while todo:
            status = todo.pop()
            if status not in seen:
                seen.add(status)
                todo += [MOVES[name].target for name in moves_from(status)]
        assert seen & FINISHED
