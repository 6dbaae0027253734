"""Functions of the inside that have no state and many kinds of input: text, durations, instants,
JSON, secrets, the URLs and the errors of databases, and values that are strange."""

from __future__ import annotations

import json
import pickle
import time
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy import exc, make_url

import delaytasks as e
from delaytasks.broker.redis_timer import redis_location
from delaytasks.db import engines
from delaytasks.db.database import Database
from delaytasks.db.engines import translate
from delaytasks.db.schema import BODY, RESULT
from delaytasks.model import body as body_json
from delaytasks.model import clock
from delaytasks.model.body import Cipher, dump_json, key_name
from delaytasks.model.inputs import parse_instant, show_duration
from delaytasks.model.text import Secret, mask_secret, mask_url, one_line, storable
from delaytasks.operate import texts
from delaytasks.operate.operations import OPERATIONS
from delaytasks.operate.texts import show_from_now, show_instant
from delaytasks.run.runner import FailureReason
from tests.fuzzing import fuzz, json_like
from tests.refusals import invalid
from tests.world import MonkeyPatch, World
from tests.world.recording import new_key

NOON = datetime(2030, 1, 31, 12, tzinfo=timezone.utc)

# -- text ----------------------------------------------------------------------------------------


def test_nul_and_lone_surrogates_are_replaced() -> None:
    assert storable("a\x00b\ud800c\udfffd", 100) == "a\ufffdb\ufffdc\ufffdd"


@pytest.mark.parametrize("character", ["a", "é", "😀", "\x00"])
@pytest.mark.parametrize("limit", [64, 100, 65_536])
def test_long_text_is_cut_in_the_middle_and_keeps_its_end(character: str, limit: int) -> None:
    cut = storable(character * limit * 2 + "the end", limit)
    assert len(cut.encode()) <= limit
    assert "characters left out" in cut
    assert limit == 64 or cut.endswith("the end")


@fuzz(300)
@given(st.text(max_size=300))
@example("a\r\nINFO forged \x1b[31m\u2028")
def test_any_text_is_shown_on_one_line_and_stored(text: str) -> None:
    assert one_line(text).isprintable()
    assert "\x00" not in storable(text, 1000)


REASONS = [
    (e.StoreUnavailableError("the database cannot be reached"), FailureReason.UNAVAILABLE),
    (e.OutcomeUnknownError("the connection broke before the answer"), FailureReason.UNAVAILABLE),
    (e.StoreError("the tables are missing"), FailureReason.REFUSED),
    (KeyError("a bug, or a row that cannot be read"), FailureReason.UNKNOWN),
]


@pytest.mark.parametrize(("error", "reason"), REASONS)
def test_only_an_absent_database_is_unavailable(error: Exception, reason: FailureReason) -> None:
    assert FailureReason.of(error) is reason


# -- durations, instants and clocks ---------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["2030-01-31T12:00:00Z", "2030-01-31 12:00z", "2030-01-31T13:00:00+01:00"]
)
def test_an_instant_is_read_with_its_zone(text: str) -> None:
    assert parse_instant(text) == NOON
    assert show_instant(parse_instant(text)) == "2030-01-31T12:00:00Z"


@pytest.mark.parametrize("text", ["", "tomorrow", "2030-02-31T00:00:00Z", "Z"])
def test_an_invalid_instant_is_refused_with_an_example(text: str) -> None:
    with invalid("at", match="2030-01-31T18:00:00Z"):
        parse_instant(text)
    with invalid("at", match="Z for UTC"):
        parse_instant("2030-01-31T12:00:00")


SHOWN = {0: "0s", 0.0123: "12ms", 5.2: "5s", 59.9: "1m", 5400: "1h30m", 3605: "1h"}
SHOWN |= {172_800: "2d", -90: "1m30s"}


def test_a_duration_is_shown_by_its_two_largest_units() -> None:
    assert {seconds: show_duration(seconds) for seconds in SHOWN} == SHOWN
    assert show_from_now(NOON + timedelta(minutes=90), NOON) == "in 1h30m"
    assert show_from_now(NOON - timedelta(seconds=5), NOON) == "5s ago"
    measured = [texts.show_measured(seconds) for seconds in (None, 0, 0.0123, 1.5, 90)]
    assert measured == ["–", "0", "12ms", "1.5s", "1m30s"]


def test_the_monotonic_clock_continues_during_a_suspension(monkeypatch: MonkeyPatch) -> None:
    """A lease ends by the database's clock, which goes on."""
    monkeypatch.setattr(time, "clock_gettime", {7: 3605.0}.__getitem__)
    monkeypatch.setattr(clock, "_BOOTTIME", 7)
    assert clock.monotonic() == 3605.0
    monkeypatch.setattr(clock, "_BOOTTIME", None)
    assert clock.monotonic() != 3605.0, "the next best clock, where there is no such clock"


def test_the_fields_of_a_form_become_arguments_by_the_zone_of_the_viewer() -> None:
    fields = {"tag": " a ", "at": "2030-01-31T18:00", "meta": "t=acme\r\np=pro\r\n", "key": ""}
    at, meta = datetime(2030, 1, 31, 17, tzinfo=timezone.utc), {"t": "acme", "p": "pro"}
    parsed = OPERATIONS["schedule"].parse(fields, ZoneInfo("Europe/Berlin"))
    assert parsed == {"tag": "a", "at": at, "meta": meta}
    with invalid("at"):
        OPERATIONS["schedule"].parse({"at": "2030-01-31T18:00"})


# -- JSON text is the same for each reader, with and without orjson -------------------------------


class Pair(NamedTuple):
    left: int
    right: int


Colour = Enum("Colour", {"RED": "red"}, type=str)


VALUES = [{"a": [1, "é 😀", None, True]}, 2**70, Pair(1, 2), {"c": Colour.RED}, [-0.0, 1e300]]


def test_both_encoders_write_the_same_json_and_refuse_the_same(monkeypatch: MonkeyPatch) -> None:
    fast = [dump_json(value) for value in VALUES]
    for is_fast in (True, False):
        for value in ({1, 2}, b"x", object()):
            with pytest.raises(TypeError):
                dump_json(value)
        if is_fast:
            monkeypatch.setattr(body_json, "orjson", None)
    assert [json.loads(text) for text in fast] == [json.loads(dump_json(each)) for each in VALUES]
    assert " " not in "".join(fast).replace("é 😀", "")


# -- secrets --------------------------------------------------------------------------------------


WORD = "sEcReT-cAnArY"
SIGNING = "whsec_c0VjUmVULWNBbkFyWXNFY1JlVC1jQW5Bclk="
URLS = [
    f":{WORD}@h:6379/0", f"user:{WORD}@h:6379/0", f"{WORD}@h:6379", f"//:{WORD}@h", SIGNING,
    f"redis://:{WORD}@h/0", f"redis://:my {WORD}@h/0", f"redis://:a@b;{WORD}@h/0",
    f"amqp://h1/;amqp://u:{WORD}@h2", f"amqp://u:{WORD}@h1/;amqp://u:{WORD}@h2/",
    f"redis://h1/0;:{WORD}@h2/0", f":{WORD}@h1;redis://h2", f"sqs://h?aws_secret_access_key={WORD}",
    f"unix:///run/redis.sock?password={WORD}", f"mysql://h/shop?ssl_key_password={WORD}&charset=utf8",
    f"postgresql://h/shop?passfile=x&sslpassword={WORD}",
]  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_no_url_and_no_part_of_one_shows_a_secret(url: str) -> None:
    for shown in (mask_url(url), mask_secret(url), repr(Secret(url)), f"{[Secret(url)]}"):
        assert WORD not in shown
        assert SIGNING.removeprefix("whsec_") not in shown


@fuzz(200)
@given(st.text("abc:/@?&=#%ü ", max_size=30).filter(lambda text: " " not in text))
@example("p@ss")
@example("p:a/ss@")
def test_no_password_in_a_url_is_shown(password: str) -> None:
    for scheme in ("redis", "postgresql+psycopg2", "amqp"):
        shown = mask_url(f"{scheme}://user:<{password}>@host/0")
        assert shown == f"{scheme}://user:***@host/0"


HARMLESS = ["redis://h:6379/0", "https://h/path?mail=a@b", "amqp://guest@h//"]
HARMLESS += ["sqlite:////srv/shop/delays.sqlite3", "postgresql://h/shop?sslmode=require", ""]


def test_a_text_without_a_secret_is_not_masked() -> None:
    assert [mask_url(url) for url in HARMLESS] == HARMLESS
    assert [mask_secret(url) for url in HARMLESS] == HARMLESS
    rest = "@h/shop?sslmode=require"
    assert mask_url(f"postgresql://shop:{WORD}{rest}") == f"postgresql://shop:***{rest}"
    assert mask_secret("localhost:6379") == "***", "nobody can tell what it is"


def test_a_secret_can_be_used_like_any_other_text() -> None:
    secret = Secret(f"redis://:{WORD}@h")
    assert secret == f"redis://:{WORD}@h" == str(secret) == f"{secret}"
    assert type(pickle.loads(pickle.dumps(secret))) is Secret


A = new_key()
#: A column, an id and a tag.
PLACE = (BODY, 7, "mail")


def test_a_text_can_only_be_decrypted_in_its_own_row_and_column() -> None:
    cipher = Cipher([A])
    sealed = cipher.seal("[1]", *PLACE)
    for place in [(RESULT, 7, "mail"), (BODY, 8, "mail"), (BODY, 7, "mail2"), (BODY, 77, "ail")]:
        assert cipher.read(sealed, *place) == sealed
    assert cipher.seal("[1]", *PLACE) != sealed, "a nonce is used once"
    for tag in ("", "\ud800", "\0", 7, None, b"mail"):  # another program has written the tag
        assert cipher.read(cipher.seal("[1]", BODY, 7, tag), BODY, 7, tag) == "[1]"


BEGINNINGS = ("{}", "aesgcm:{}", f"aesgcm:{key_name(A)}:{{}}")


@given(st.one_of(json_like, *(st.text().map(begin.format) for begin in BEGINNINGS)))
@example(float("nan"))
def test_any_value_in_a_row_is_decrypted_or_returned_unchanged(found: Any) -> None:
    assert repr(Cipher([A]).read(found, *PLACE)) == repr(found), "a NaN is not equal to itself"


# -- the URL of Redis -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "broker", "url"),
    [
        ("redis://a/1", "amqp://b", "redis://a/1"),
        ("", "redis://b/2", "redis://b/2"),
        ("", "redis://b/2;redis://c/2", "redis://b/2;redis://c/2"),
        ("redis://a;redis://b", None, "redis://a;redis://b"),
        ("", ["rediss://b/2?ssl_cert_reqs=CERT_REQUIRED"], "rediss://b/2?ssl_cert_reqs=required"),
        ("", "redis+socket:///run/x.sock?virtual_host=3", "unix:///run/x.sock?db=3"),
    ],
)
def test_the_redis_is_the_brokers_unless_one_is_named(given: str, broker: Any, url: str) -> None:
    assert ";".join(redis_location(given, broker).urls) == url


INVALID: list[tuple[str, Any]] = [("", "amqp://u:secret@b"), ("http://u:secret@a", "redis://b")]
WRONG = ["", "redis://:se/cret@a", "redis://a:port/0", "redis://[::1", "redis://a/0?nonsense=1"]
INVALID += [(url, None) for url in (*WRONG, "rediss://a?ssl_cert_reqs=x")]
SENTINELS = [(f"sentinel://:secret@a:26379/2;{it}", None) for it in ("sentinel://b", "redis://b")]


@pytest.mark.parametrize(("given", "broker"), INVALID + SENTINELS)
def test_a_wrong_redis_is_an_error_that_shows_no_password(given: str, broker: Any) -> None:
    with pytest.raises(e.ConfigError, match=r"delaytasks_timer|master_name|needs a Redis") as got:
        redis_location(given, broker)
    assert "cret" not in str(got.value)


# -- the URL of the database ----------------------------------------------------------------------


DRIVERS = {
    "postgresql://h/d": "postgresql+psycopg2://h/d",
    "postgres://h/d": "postgresql+psycopg2://h/d",
    "postgresql+psycopg://me:p%40ss@h:5433/d": "postgresql+psycopg://me:p%40ss@h:5433/d",
    "postgresql+psycopg_async://h/d": "postgresql+psycopg://h/d",
    "postgresql+asyncpg://h/d?ssl=require": "postgresql+psycopg2://h/d?sslmode=require",
    "mysql+aiomysql://h/d": "mysql+pymysql://h/d",
    "mysql+mysqldb://h/d?charset=utf8": "mysql+pymysql://h/d?charset=utf8",
    "mariadb://h/d": "mariadb+pymysql://h/d",
    "sqlite+aiosqlite:////srv/d.sqlite3": "sqlite:////srv/d.sqlite3",
    "sqlite://": "sqlite://",
}


def test_a_url_with_the_driver_of_the_callers_application_works() -> None:
    ours = {url: Database(url).url.render_as_string(hide_password=False) for url in DRIVERS}
    assert ours == DRIVERS


SAME = [
    ("postgresql://me@h/d", "postgresql+psycopg://you@h:5432/d?sslmode=require"),
    ("postgresql:///d?host=/run/a&port=5433", "postgresql:///d?host=/run/a&port=5433&user=me"),
    ("mysql://h/d", "mariadb+pymysql://h:3306/d"),
    ("sqlite:////srv/d", "sqlite+aiosqlite:////srv/d"),
]
DIFFERENT = [
    ("postgresql:///d?host=h1&host=h2", "postgresql:///d?host=h3&host=h4"),
    ("postgresql:///d?host=h:1&host=i:1", "postgresql:///d?host=h:2&host=i:2"),
    ("postgresql:///d?service=a", "postgresql:///d?service=b"),
    ("postgresql://h/d", "postgresql://h/e"),
    ("mysql://localhost/d?unix_socket=/run/a", "mysql://localhost/d?unix_socket=/run/b"),
    ("mysql://h/d", "postgresql://h/d"),
    ("sqlite:////srv/d", "sqlite:////srv/e"),
]


def test_users_and_drivers_do_not_distinguish_databases() -> None:
    for pairs, is_same in ((SAME, True), (DIFFERENT, False)):
        for one, other in pairs:
            same = engines.is_same_database(make_url(one), make_url(other))
            assert same is is_same, (one, other)


# -- the errors of the database's driver ----------------------------------------------------------


def error(
    *args: Any, state: str | None = None, kind: type[exc.DBAPIError] = exc.OperationalError
) -> exc.DBAPIError:
    return kind("UPDATE", None, type("DriverError", (Exception,), {"pgcode": state})(*args))


def sqlite_error(text: str) -> exc.DBAPIError:
    made = type("OperationalError", (Exception,), {"__module__": "sqlite3"})(text)
    return exc.OperationalError("UPDATE", None, made)


def lost() -> exc.DBAPIError:
    failure = error("the connection broke")
    failure.connection_invalidated = True
    return failure


def without_savepoint() -> exc.DBAPIError:
    failure = error(1305, "SAVEPOINT sa_savepoint_1 does not exist")
    failure.__context__ = error(1213, "Deadlock found")
    return failure


def run(*outcomes: Any, id: int | None = None) -> object:
    """Run work that raises these errors, one a try, or returns. It changes the task `id`."""
    left = list(outcomes)

    def work(_: Any) -> Any:
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, Exception):
            raise found
        return found

    return Database("sqlite://").repeat(work, nullcontext, id)


UNABLE = [error("no", state=state) for state in "53100 53200 57014 57P01 57P02 58030 25006".split()]
UNABLE += [error(code, "no") for code in (1021, 1040, 1053, 1114, 1203, 1226, 1317, 1047, 1180)]
UNABLE += [error(code, "no") for code in (1290, 1792, 1836, 1874, 3100)]
UNABLE += map(sqlite_error, ["database or disk is full", "disk I/O error", "a readonly database"])
SYNTAX = [error("syntax", state="42601"), error(1064, "syntax"), sqlite_error("near x: syntax")]


def test_a_server_that_answers_but_cannot_work_is_unavailable() -> None:
    for failure in UNABLE:
        assert type(translate(failure)) is e.StoreUnavailableError, failure
        assert "cannot work now" in str(translate(failure))
    assert {type(translate(failure)) for failure in SYNTAX} == {e.StoreError}


STALE, ENDED = e.StaleVersionError("version 1, not 0"), e.TaskStateError("it waits")
TAKEN, NONE_FREE = e.DuplicateTaskError("there is one"), exc.TimeoutError("all in use")
#: With error 1180, Galera may have lost its cluster during COMMIT. The other nodes may have the
#: transaction.
UNSURE = error(1180, "Got error 6 during COMMIT")
OUTCOMES: list[tuple[list[Any], int | None, type[Exception], str]] = [
    ([UNSURE], 7, e.OutcomeUnknownError, r"during COMMIT.*look at task 7"),
    ([UNSURE, STALE], 7, e.OutcomeUnknownError, "look at task 7"),
    ([UNSURE], None, e.StoreUnavailableError, "during COMMIT"),
    ([lost(), STALE], 7, e.OutcomeUnknownError, "version 1, not 0.*look at task 7"),
    ([lost(), ENDED], 7, e.OutcomeUnknownError, "it waits.*look at task 7"),
    ([lost(), NONE_FREE], 7, e.OutcomeUnknownError, "no free connection.*look at task 7"),
    ([NONE_FREE], 7, e.StoreUnavailableError, "no free connection"),
    ([lost(), NONE_FREE], None, e.StoreUnavailableError, "no free connection"),
    ([STALE], 7, e.StaleVersionError, ""),
    ([error("deadlock", state="40P01"), STALE], 7, e.StaleVersionError, ""),
    ([lost(), TAKEN], 7, e.DuplicateTaskError, ""),
]


@pytest.mark.parametrize(("outcomes", "id", "kind", "said"), OUTCOMES)
def test_a_lost_answer_leaves_changes_unknown(outcomes: Any, id: Any, kind: Any, said: str) -> None:
    with pytest.raises(kind, match=said or None) as caught:
        run(*outcomes, id=id)
    assert type(caught.value) is kind
    assert kind is not e.OutcomeUnknownError or caught.value.id == 7


def test_a_deadlock_that_removed_the_savepoint_is_tried_again() -> None:
    assert run(without_savepoint(), 7) == 7


QUOTING = [
    error(1062, f"Duplicate entry '{WORD}' for key 'PRIMARY'", kind=exc.IntegrityError),
    error(1366, f"Incorrect string value: '{WORD}' for column", kind=exc.DataError),
    error(f'invalid input syntax for type integer: "{WORD}"', state="22P02", kind=exc.DataError),
]


@pytest.mark.parametrize("failure", QUOTING)
def test_an_error_names_its_number_and_no_values(failure: Any) -> None:
    with pytest.raises(e.StoreError, match=str(failure.orig.pgcode or failure.orig.args[0])) as got:
        run(failure)
    said: BaseException | None = got.value
    while said is not None:
        assert WORD not in f"{said!s} {said!r}"
        said = said.__cause__ or said.__context__
    assert WORD not in f"{failure.orig!s} {failure.orig!r}"


# -- arbitrary durations, headers, versions and values are kept or refused ------------------------


anything = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    *(st.lists(st.text()), st.builds(object)),
)
durations = st.text() | st.text("0123456789.smhdw +-", max_size=12)
durations |= st.from_regex(r"\d{1,400}(\.\d+)?[smhd]")


@fuzz(300)
@given(st.lists(anything | durations, max_size=4) | anything, st.floats() | json_like)
def test_any_retry_schedule_is_valid_or_refused(retry_delays: Any, variation: Any) -> None:
    try:
        retry_schedule = e.RetrySchedule(retry_delays, variation=variation)
    except (e.InvalidInputError, TypeError):  # a value that is not iterable is no list of delays
        return
    assert all(0 <= delay_s <= 1e9 for delay_s in retry_schedule.retry_delays_s)


DURATIONS: dict[str, float] = {"90": 90, "0": 0, "0.5": 0.5, "1h30m": 5400, "1h 30m": 5400}
DURATIONS |= {" 2d ": 172_800, "1w": 604_800, "500ms": 0.5, "1.5h": 5400, "1H30M": 5400}
DURATIONS |= {"1m500ms": 60.5, "1w2d3h4m5s6ms": 788_645.006}


def test_a_duration_is_read_as_people_write_it() -> None:
    assert {text: e.RetrySchedule([text]).retry_delays_s[0] for text in DURATIONS} == DURATIONS


NO_DURATIONS = ["", " ", "x", "1x", "h", "30m1h", "1h1h", "1e9", "nan", "inf", "1,5", "1h30", "٣"]
REFUSED_DURATIONS = [
    *((text, "1h30m") for text in (*NO_DURATIONS, "1m s", "0x10", "1 2")),
    *((text, "not negative") for text in ("-5", "-1h", " -0.1")),
    *((text, "longer") for text in ("9" * 30, "9" * 400, "9" * 30 + "w")),
]


@pytest.mark.parametrize(("text", "said"), REFUSED_DURATIONS)
def test_an_invalid_negative_or_endless_duration_is_refused(text: str, said: str) -> None:
    with invalid("retry_delays", match=said):
        e.RetrySchedule([text])


@fuzz(300)
@given(st.builds(json.dumps, json_like) | st.text(max_size=30), st.integers(-(2**31), 2**31 - 1))
@example('{"max_late_s": ' + "9" * 400 + "}", 1)
@example('{"retry": {"retry_delays_s": [5], "variation": 0}}', -5)
@example('{"retry": {"retry_delays_s": 5, "variation": 0}, "max_late_s": NaN}', 1)
def test_any_headers_of_a_row_are_read(headers: str, attempts: int) -> None:
    now = datetime.now(timezone.utc)
    texts = {"headers_json": headers, "result_json": headers}
    task = e.DelayedTask(1, "mail", headers, now, runs=attempts, ip=attempts, **texts)
    assert task.max_late_s is None or 0 <= task.max_late_s < 1e15
    assert task.retry_schedule is None or isinstance(task.retry_schedule, e.RetrySchedule)
    if task.retry_schedule is not None:
        wait_s = task.retry_schedule.wait_s(attempts)
        assert wait_s is None or wait_s >= 0
    json.dumps(task.as_json(), allow_nan=False)


@pytest.mark.parametrize(("version", "next_ones"), [(2**62 - 1, [2**62, 0]), (2**63 - 1, [0, 1])])
def test_a_version_begins_at_0_after_its_range(world: World, version: int, next_ones: Any) -> None:
    task = world.schedule()
    world.change(task, version=version)
    assert [world.delays.reschedule(task.id, 0).version for _ in next_ones] == next_ones
    assert world.read(task).version == next_ones[-1]
