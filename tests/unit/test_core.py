"""Values and rules: ids, the clock, text, settings and moves."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from delaytasks.core import clock as clock_module
from delaytasks.core.clock import Clock, ManualClock, from_us, to_us
from delaytasks.core.errors import ConfigError, InvalidIdError
from delaytasks.core.ids import COUNTER_BITS, EPOCH_MS, MAX_ID, SHARD_BITS, IdMaker, check_id
from delaytasks.core.masking import mask_url
from delaytasks.core.settings import Settings, load_settings
from delaytasks.core.states import FINISHED, LIVE, MOVES, Status, moves_from
from delaytasks.core.text import one_line, storable, traceback_text
from tests.waiting import wait_until

UTC = timezone.utc
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)

# -- ids ------------------------------------------------------------------------------------------


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


# -- clock ----------------------------------------------------------------------------------------


class FakeTime:
    """The host's two clocks. The wall clock may be wrong and may be set."""

    def __init__(self) -> None:
        self.at = 1000.0
        self.wall = 1_700_000_000.0
        self.askers: set[int] = set()

    def monotonic(self) -> float:
        self.askers.add(threading.get_ident())
        return self.at

    def time_ns(self) -> int:
        return int(self.wall * 1e9)

    def advance(self, seconds: float) -> None:
        self.at += seconds
        self.wall += seconds


class FakeDatabase:
    """A database with a correct clock, whose answers take some time."""

    def __init__(self, host: FakeTime) -> None:
        self.host, self.asked, self.insisted, self.is_up = host, 0, 0, True
        self.meanwhile: Callable[[], object] = lambda: None
        self.trips = [0.0]
        # The database's clock gained this time while the host slept.
        self.ahead_s = 0.0

    def now(self, insists: bool = False) -> datetime:
        self.asked += 1
        self.insisted += insists
        self.meanwhile()
        if not self.is_up:
            raise ConnectionError("down")
        trip = self.trips[self.asked % len(self.trips)]
        self.host.advance(trip / 2)
        told = NOON + timedelta(seconds=self.host.at - 1000 + self.ahead_s)
        self.host.advance(trip / 2)
        return told


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    host = FakeTime()
    monkeypatch.setattr(clock_module, "time", host)
    return host


def right(host: FakeTime) -> datetime:
    return NOON + timedelta(seconds=host.at - 1000)


def apart(clock: Clock, host: FakeTime) -> float:
    return abs((clock.now() - right(host)).total_seconds())


def test_the_clock_follows_the_database_and_not_the_host(host: FakeTime) -> None:
    clock = Clock(FakeDatabase(host).now)
    assert apart(clock, host) < 1e-5
    host.advance(30)
    assert apart(clock, host) < 1e-5
    ahead = host.wall - right(host).timestamp()
    assert clock.offset_s == pytest.approx(ahead, abs=1e-3)


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_step_of_the_hosts_clock_makes_no_difference(host: FakeTime, step: float) -> None:
    clock = Clock(FakeDatabase(host).now, refresh_s=60)
    before = clock.now_us()
    host.wall += step
    host.advance(1)
    assert clock.now_us() - before == pytest.approx(1e6, abs=10)
    host.advance(100)  # the clock measures again
    assert apart(clock, host) < 1e-5


def test_the_database_is_asked_once_in_a_while_and_the_fastest_answer_counts(
    host: FakeTime,
) -> None:
    database = FakeDatabase(host)
    database.trips = [0.4, 0.3, 0.002]
    clock = Clock(database.now, refresh_s=60)
    assert apart(clock, host) <= 0.002
    assert database.asked == 3
    for _ in range(50):
        clock.now_us()
    assert database.asked == 3
    host.advance(61)
    clock.now_us()
    assert database.asked == 6
    clock.forget()
    clock.now_us()
    assert database.asked == 9


def test_while_the_database_is_unavailable_the_clock_continues_and_asks_again(
    host: FakeTime,
) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refresh_s=60)
    clock.now_us()
    database.is_up = False
    host.wall += 3600
    host.advance(100)
    assert apart(clock, host) < 1e-5
    asked = database.asked
    clock.now_us()
    assert database.asked == asked  # the clock does not ask the database at every call
    database.is_up = True
    host.advance(2)
    clock.now_us()
    assert database.asked > asked


def test_a_failure_that_took_long_is_followed_by_a_rest_too(host: FakeTime) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refresh_s=60)
    clock.now_us()
    # The connection attempt times out after five seconds.
    database.is_up, database.meanwhile = (
        False,
        lambda: host.advance(5),
    )
    host.advance(61)
    for _ in range(20):
        clock.now_us()
    assert database.asked == 3 + 1


def test_no_thread_waits_while_another_thread_measures(host: FakeTime) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refresh_s=60)
    clock.now_us()
    host.advance(61)
    asks, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        asks.set()
        assert goes_on.wait(10)

    database.meanwhile = hang
    with ThreadPoolExecutor(9) as pool:
        measuring = pool.submit(clock.now_us)
        try:
            assert asks.wait(5)
            for other in [pool.submit(clock.certain_now) for _ in range(8)]:
                assert other.result(2) == right(host)
            assert not measuring.done()
        finally:
            goes_on.set()
    assert database.asked == 6


def test_without_inline_refreshes_only_refresh_if_due_measures(host: FakeTime) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refresh_s=60, refreshes_inline=False)
    assert clock.now_us() == int(host.wall * 1e6), "until something is known"
    assert database.asked == 0
    clock.refresh_if_due()
    host.advance(61)
    clock.forget()
    assert apart(clock, host) < 1e-5
    assert database.asked == 3
    clock.refresh_if_due()
    clock.refresh_if_due()
    assert database.asked == 6
    database.is_up = False
    host.advance(61)
    clock.refresh_if_due()  # a failed refresh raises no error in the calling loop
    assert apart(clock, host) < 1e-5


def test_a_forked_child_measures_for_itself(host: FakeTime) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refresh_s=60, refreshes_inline=False)
    clock.refresh_if_due()
    clock.after_fork()
    host.advance(61)
    clock.now_us()
    assert database.asked == 6


@pytest.mark.parametrize("refreshes_inline", [True, False])
def test_after_the_host_slept_the_certain_time_is_measured_again(
    host: FakeTime, refreshes_inline: bool
) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now, refreshes_inline=refreshes_inline)
    assert clock.certain_now() == right(host)
    # While the host slept, its monotonic clock stood still and the database's clock continued.
    host.wall += 8 * 3600
    database.ahead_s = 8 * 3600
    assert clock.certain_now() == right(host) + timedelta(hours=8)
    host.wall += 3600
    database.ahead_s = 9 * 3600
    clock.refresh_if_due()
    assert clock.now() == right(host) + timedelta(hours=9)
    host.wall += 0.4  # time synchronization makes such steps now and then
    asked = database.asked
    clock.certain_now()
    assert database.asked == asked


def test_without_a_database_the_hosts_own_clock_is_used(host: FakeTime) -> None:
    assert Clock().now() == Clock().certain_now() == from_us(int(host.wall * 1e6))
    database = FakeDatabase(host)
    database.is_up = False
    assert abs(Clock(database.now).now() - from_us(int(host.wall * 1e6))) < timedelta(
        milliseconds=1
    )


def test_no_row_is_made_due_by_the_hosts_clock_because_the_database_did_not_answer(
    host: FakeTime,
) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now)
    database.is_up = False
    assert clock.now_us() == int(host.wall * 1e6)  # `certain_now` asks without a rest
    for _ in range(2):
        with pytest.raises(ConnectionError):
            clock.certain_now()
    assert database.insisted == 2
    database.is_up = True
    assert clock.certain_now() == right(host)


def test_threads_that_need_the_certain_time_fail_together(host: FakeTime) -> None:
    database = FakeDatabase(host)
    clock = Clock(database.now)

    def time_out() -> None:
        wait_until(lambda: len(host.askers) == 8, 5, "all threads to ask")
        host.advance(5)
        database.is_up = False

    database.meanwhile = time_out
    with ThreadPoolExecutor(8) as pool:
        looks = [pool.submit(clock.certain_now) for _ in range(8)]
        assert all(isinstance(each.exception(5), ConnectionError) for each in looks)
    assert database.asked == 1


def test_many_threads_measure_once(host: FakeTime) -> None:
    database = FakeDatabase(host)
    clock, start = Clock(database.now), threading.Barrier(8)

    def look(_: int) -> int:
        start.wait()
        return clock.now_us()

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(look, range(8)))) == 1
    assert database.asked == 3


def test_microseconds_since_1970_and_back_lose_nothing() -> None:
    for instant in (
        NOON,
        NOON + timedelta(microseconds=1),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC),
    ):
        assert from_us(to_us(instant)) == instant


def test_a_manual_clock_stands_until_it_is_moved() -> None:
    clock = ManualClock(NOON)
    clock.advance(1.5)
    assert clock.now() == clock.now() == NOON + timedelta(seconds=1.5)


# -- text -----------------------------------------------------------------------------------------


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


def test_one_line_forges_no_second_one() -> None:
    shown = one_line("a\r\nINFO forged \x1b[31m\u2028" + "x" * 500, 60)
    assert shown.isprintable()
    assert "\\r\\n" in shown
    assert shown.endswith("…")


# -- settings -------------------------------------------------------------------------------------


def test_without_settings_the_defaults_hold() -> None:
    settings = load_settings({}, {})
    assert settings == Settings()
    assert settings.origin("lease_s") == "default"


def test_the_environment_wins_over_celerys_configuration_and_arguments_win_over_both() -> None:
    conf = {
        "delaytasks_lease_s": 10,
        "delaytasks_sweep_s": 6,
        "delaytasks_sweep_partitions": 2,
        "broker_url": "memory://",
    }
    environ = {"DELAYTASKS_LEASE_S": "20", "DELAYTASKS_SWEEP_S": "7", "PATH": "/bin"}
    settings = load_settings(conf, environ, lease_s=30.0)
    assert (settings.lease_s, settings.sweep_s, settings.sweep_partitions) == (30.0, 7.0, 2)
    origins = [
        settings.origin(name) for name in ("lease_s", "sweep_s", "sweep_partitions", "grace_s")
    ]
    assert origins == ["arguments", "environment", "celery configuration", "default"]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            lambda: load_settings({"delaytasks_leas_s": 1}, {}),
            "delaytasks_leas_s .*celery.*mean delaytasks_lease_s",
        ),
        (
            lambda: load_settings({}, {"DELAYTASKS_HORIZON": "1"}),
            "delaytasks_horizon .*mean delaytasks_horizon_s",
        ),
        (
            lambda: load_settings({}, {}, databse_url="x"),
            "delaytasks_databse_url .*mean delaytasks_database_url",
        ),
    ],
)
def test_a_typo_is_answered_with_the_nearest_name(
    load: Callable[[], Settings], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load()


def test_a_name_near_to_nothing_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError, match="unknown setting delaytasks_zzzzzzzz") as caught:
        load_settings({"delaytasks_zzzzzzzz": 1}, {})
    assert "mean" not in str(caught.value)


def test_variables_of_the_tests_are_no_settings() -> None:
    for name in ("DELAYTASKS_TEST_REDIS_URL", "DELAYTASKS_BENCH_BROKER_URL", "DELAYTASKS_APP"):
        assert load_settings({}, {name: "redis://x"}) == Settings()


SHARD_URLS = ("mysql://a/x", "postgresql+psycopg2://b/y?options=-c a=b")


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("horizon_s", "none", None),
        ("horizon_s", None, None),
        ("purge_after_s", "86400", 86400.0),
        ("strict_tags", "yes", True),
        ("strict_tags", "0", False),
        ("strict_tags", False, False),
        ("pool_size", "7", 7),
        ("lease_s", 30, 30.0),
        ("queues", {"mail.*": "mail"}, {"mail.*": "mail"}),
        ("queues", '{"mail.*": "mail", "a,b=c": "slow"}', {"mail.*": "mail", "a,b=c": "slow"}),
        ("database_url", "sqlite:///a file.db", ("sqlite:///a file.db",)),
        ("database_url", " mysql://a/x\n postgresql+psycopg2://b/y?options=-c a=b ", SHARD_URLS),
        ("database_url", list(SHARD_URLS), SHARD_URLS),
        ("database_url", " ", ()),
    ],
)
def test_values_are_read_as_their_type(name: str, given: Any, value: Any) -> None:
    found = getattr(load_settings({PREFIXED + name: given}, {}), name)
    assert (found, type(found)) == (value, type(value))


PREFIXED = "delaytasks_"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("pool_size", "many"),
        ("pool_size", 1.5),
        ("pool_size", True),
        ("pool_size", 0),
        ("lease_s", "nan"),
        ("lease_s", float("inf")),
        ("lease_s", 10**400),
        ("pool_size", 10**400),
        ("lease_s", None),
        ("lease_s", -1),
        ("lease_s", 0.05),  # shorter than two time boxes of a chunk
        ("strict_tags", "perhaps"),
        ("arm", "never"),
        ("namespace", "a b"),
        ("table_prefix", "x; DROP TABLE"),
        ("table_schema", "a.b"),
        ("chunk_max", 5000),
        ("self_sweep_s", 1),  # below sweep_s
        ("horizon_s", 6),  # below two sweeps
        ("database_url", 5),
        ("default_queue", "a b"),
        ("queues", "mail.*=mail"),
        ("queues", '["mail"]'),
        ("queues", {"mail.*": 5}),
        ("queues", {"": "mail"}),
        ("queues", {"mail.*": "a b"}),
        ("queues", None),
        ("database_url", ["sqlite://", ""]),
        ("horizon_s", 1e12),  # no date is that far away
        ("shards_before", 1),  # there is only one shard
        ("shards_before", 0),
    ],
)
def test_a_wrong_value_is_named_with_its_origin(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"delaytasks_{name} = .*celery configuration"):
        load_settings({PREFIXED + name: given}, {})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:canary@host/x", "postgresql://me:***@host/x"),
        (
            "postgresql://host/x?user=me&password=canary&a=1",
            "postgresql://host/x?user=me&password=***&a=1",
        ),
        ("redis://:canary@host/0", "redis://:***@host/0"),
        ("sqlite:///x.sqlite3", "sqlite:///x.sqlite3"),
        ("", ""),
    ],
)
def test_passwords_are_never_shown(url: str, shown: str) -> None:
    assert mask_url(url) == shown


def test_the_effective_settings_show_their_origin_and_no_secret() -> None:
    settings = load_settings(
        {}, {"DELAYTASKS_DATABASE_URL": "mysql://me:canary@host/x"}, purge_after_s=None
    )
    rows = {name: (value, origin) for name, value, origin, _about in settings.effective()}
    assert rows["delaytasks_database_url"] == ("mysql://me:***@host/x", "environment")
    assert rows["delaytasks_purge_after_s"] == ("none", "arguments")
    assert "canary" not in repr(rows)
    assert all(about for *_, about in settings.effective())


def test_a_settings_error_does_not_show_the_secret() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings({"delaytasks_database_url": ["mysql://me:canary@host/x", 5]}, {})
    assert "canary" not in str(caught.value)
    with pytest.raises(ConfigError, match="at most 32") as caught:
        load_settings({"delaytasks_database_url": ["mysql://me:canary@host/x"] * 33}, {})
    assert "canary" not in str(caught.value)


# -- moves ----------------------------------------------------------------------------------------


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


def test_the_moves_are_those_of_the_contract() -> None:
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
        "retry": ({failed, cancelled}, waiting),
    }
    assert all(move.name == name for name, move in MOVES.items())


def test_only_an_operators_retry_leaves_a_finished_status() -> None:
    assert {name for status in FINISHED for name in moves_from(status)} == {"retry"}
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
