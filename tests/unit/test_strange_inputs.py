"""Arbitrary names, durations, bodies, headers, URLs and instants are kept or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import datetime, timezone
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from delaytasks import DelayedTask, DelayTaskError, InvalidInputError, RetrySchedule
from delaytasks.core import body as body_json
from delaytasks.core.body import dump_flat, dump_json, encode_body
from delaytasks.core.inputs import check_delay, check_key, check_queue, check_tag, check_wait
from delaytasks.core.states import MOST_VERSIONS, following
from delaytasks.core.text import mask_url, one_line, storable
from tests.fuzzing import fuzz, json_like

# -- arbitrary names, durations, headers, URLs and instants are kept unchanged or refused ---------


anything = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    *(st.lists(st.text()), st.builds(object)),
)
durations = st.text() | st.text("0123456789.smhdw +-", max_size=12)
durations |= st.from_regex(r"\d{1,400}(\.\d+)?[smhd]")


def attempt(work: Callable[[], str]) -> tuple[str, InvalidInputError | None]:
    try:
        return work(), None
    except InvalidInputError as error:
        return "", error


@fuzz(200)
@given(anything | durations)
def test_any_wait_is_converted_to_seconds_or_refused(wait: Any) -> None:
    try:
        seconds = check_wait(wait, 1000)
    except InvalidInputError:
        return
    assert 0 <= seconds <= 1000
    assert math.isfinite(seconds)


@fuzz(300)
@given(anything | st.text("ab\x00\x1b\r\n \u202e\ud800é😀", max_size=200))
def test_any_name_is_unchanged_or_refused(name: Any) -> None:
    for check, most in ((check_tag, 128), (check_key, 191), (check_queue, 100)):
        kept, refusal = attempt(lambda check=check: check(name))  # type: ignore[misc]
        if refusal is not None:
            assert str(refusal).isprintable()
            continue
        assert (kept, type(kept)) == (name, str)
        assert kept.isprintable()
        assert len(kept) <= most
        kept.encode()


@fuzz(300)
@given(st.builds(json.dumps, json_like) | st.text(max_size=30), st.integers(-(2**31), 2**31 - 1))
@example('{"max_late_s": ' + "9" * 400 + "}", 1)
@example('{"retry": {"retry_delays_s": [5], "jitter": 0}}', -5)
@example('{"retry": {"retry_delays_s": 5, "jitter": 0}, "max_late_s": NaN}', 1)
def test_any_headers_of_a_row_are_read(headers: str, attempts: int) -> None:
    now = datetime.now(timezone.utc)
    texts = {"headers_json": headers, "result_json": headers}
    task = DelayedTask(1, "mail", headers, now, runs=attempts, ip=attempts, **texts)
    for seconds in (task.max_late_s, task.max_wait_s):
        assert seconds is None or 0 <= seconds < 1e15
    assert task.retry_schedule is None or isinstance(task.retry_schedule, RetrySchedule)
    if task.retry_schedule is not None:
        wait_s = task.retry_schedule.wait_s(attempts)
        assert wait_s is None or wait_s >= 0
    json.dumps(task.as_json())


@fuzz(200)
@given(st.lists(anything | durations, max_size=4) | anything, st.floats() | json_like)
def test_any_retry_schedule_is_valid_or_refused(retry_delays: Any, jitter: Any) -> None:
    try:
        retry_schedule = RetrySchedule(retry_delays, jitter=jitter)
    except (InvalidInputError, TypeError):  # a value that is not iterable is no list of delays
        return
    assert all(retry_delay >= 0 for retry_delay in retry_schedule.retry_delays_s)


@fuzz(200)
@given(st.text("abc:/@?&=#%ü ", max_size=30).filter(lambda text: " " not in text))
@example("p@ss")
@example("p:a/ss@")
def test_no_password_in_a_url_is_shown(password: str) -> None:
    for scheme in ("redis", "postgresql+psycopg2", "amqp"):
        shown = mask_url(f"{scheme}://user:<{password}>@host/0")
        assert shown == f"{scheme}://user:***@host/0"


@fuzz(300)
@given(st.text(max_size=300))
def test_any_text_is_shown_on_one_line_and_stored(text: str) -> None:
    assert one_line(text).isprintable()
    kept = storable(text, 1000)
    assert "\x00" not in kept
    assert len(kept.encode()) <= 1000 or len(text.encode(errors="replace")) <= 1000


def test_a_version_at_the_end_of_its_range_is_counted_from_0_again() -> None:
    assert [following(version) for version in (0, MOST_VERSIONS - 1)] == [1, MOST_VERSIONS]
    assert {following(version) for version in (MOST_VERSIONS, 2**63 - 1)} == {0}


class Base(DeclarativeBase):
    """The tables of an application."""


class MappedOrder(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


CALLS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: encode_body({"o": MappedOrder()}, 99),
        r"\$\.o: MappedOrder cannot .*: pass its primary key, and",
    ),
    (lambda: check_key(MappedOrder()), "not MappedOrder; .*maps: pass its primary key"),
    (lambda: check_key(7), r"key is a string, not int: write str\(7\)$"),
    (lambda: check_delay(datetime.now(timezone.utc), 9), "pass an instant as at="),
]


@pytest.mark.parametrize(("call", "remedy"), CALLS)
def test_a_usual_wrong_type_is_refused_with_a_remedy(call: Callable[[], Any], remedy: str) -> None:
    with pytest.raises(InvalidInputError, match=remedy):
        call()


# -- JSON text is the same for each reader, with and without orjson -------------------------------


class Pair(NamedTuple):
    left: int
    right: int


Colour = Enum("Colour", {"RED": "red"}, type=str)


class Odd(str, Enum):
    """An enum whose value differs from its text."""

    A = "a"

    def __new__(cls, text: str) -> Odd:
        made = str.__new__(cls, text)
        made._value_ = float("nan")
        return made


VALUES = [{"a": [1, "é 😀", None, True]}, 2**70, Pair(1, 2), {"c": Colour.RED}, [-0.0, 1e300]]


@pytest.mark.parametrize("value", VALUES, ids=range(5))
def test_both_encoders_write_the_same_json(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = dump_json(value)
    monkeypatch.setattr(body_json, "orjson", None)
    assert json.loads(fast) == json.loads(dump_json(value))
    assert " " not in fast.replace("é 😀", "")


class Sly(dict[str, Any]):
    """A dictionary whose `items` method hides its content."""

    def items(self) -> Any:
        return [("shown", 1)]


@pytest.mark.parametrize(
    "body", [[Odd.A], {Odd.A: 1}, [Pair(1, 2)], Sly(held=2), [Sly(held=2)]], ids=range(5)
)
def test_a_body_of_subclasses_is_written_as_the_standard_library_does(body: Any) -> None:
    assert encode_body(body, 1000) == json.dumps(body, separators=(",", ":"))


Leaf = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text("a\x00\ud800é😀\\nul", max_size=8)
    | st.sampled_from([Colour.RED, UUID(int=1), datetime(2026, 1, 1), Decimal(1), (1, 2)])
)


@given(st.dictionaries(st.text("ak\x00é\\", max_size=3) | Leaf, Leaf, max_size=3))
@example({"a": 2**70, "b": "null"})
@example({"a": float("nan")})
@example({"a": "\x00"})
@example({"a": "\ud800"})
@example({"a": True, "b": 1.5, "c": None})
@example({"a": UUID(int=1)})
@example({"a": datetime(2026, 1, 1)})
@example({"a": Colour.RED})
def test_a_flat_body_is_written_or_refused_as_any_other(body: Any) -> None:
    def encode() -> Any:
        try:
            return encode_body(body, 4000)
        except DelayTaskError as error:
            return type(error), str(error)

    found = encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_json, "dump_flat", lambda value: None)
        assert encode() == found


def test_only_small_flat_bodies_of_plain_values_use_the_short_path() -> None:
    flat = {"a": 1, "é": "ü", "n": None, "x": -0.5}
    assert dump_flat(flat) == '{"a":1,"é":"ü","n":null,"x":-0.5}'
    bodies: list[Any] = [{"a": "x" * 1000}, dict.fromkeys(map(str, range(1000)), 1), {"a": []}]
    bodies += [[1], {"a": Colour.RED}, {"a": "\\"}]
    for body in bodies:
        assert dump_flat(body) is None


@pytest.mark.parametrize("value", [{1, 2}, b"x", object()], ids=lambda value: type(value).__name__)
def test_both_encoders_refuse_the_same_values(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError):
        dump_json(value)
    monkeypatch.setattr(body_json, "orjson", None)
    with pytest.raises(TypeError):
        dump_json(value)
