"""JSON text is the same for each reader, with and without orjson."""

from __future__ import annotations

import json
from datetime import datetime
from decimal import Decimal
from enum import Enum
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaytasks.core import body as body_json
from delaytasks.core import body as jsontext
from delaytasks.core.body import dump_flat, dump_json, encode_body
from delaytasks.core.errors import BodyTooLargeError, DelayTaskError

Json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


class Pair(NamedTuple):
    left: int
    right: int


class Colour(str, Enum):
    RED = "red"


class Odd(str, Enum):
    """An enum whose value differs from its text."""

    A = "a"

    def __new__(cls, text: str) -> Odd:
        made = str.__new__(cls, text)
        made._value_ = float("nan")
        return made


@given(Json)
def test_written_json_is_read_back_unchanged(value: Any) -> None:
    assert jsontext.orjson is not None, "the test extra brings it"  # type: ignore[attr-defined]
    assert json.loads(dump_json(value)) == value


@pytest.mark.parametrize(
    "value",
    [{"a": [1, "é 😀", None, True]}, 2**70, Pair(1, 2), {"c": Colour.RED}, [-0.0, 1e300]],
    ids=["mixed", "long", "pair", "enum", "floats"],
)
def test_both_encoders_write_the_same_json(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = dump_json(value)
    monkeypatch.setattr(jsontext, "orjson", None)
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
    assert (
        dump_flat({"a": 1, "é": "ü", "n": None, "x": -0.5}) == '{"a":1,"é":"ü","n":null,"x":-0.5}'
    )
    bodies: list[Any] = [
        {"a": "x" * 1000},
        dict.fromkeys(map(str, range(1000)), 1),
        {"a": []},
        [1],
        {"a": Colour.RED},
        {"a": "\\"},
    ]
    for body in bodies:
        assert dump_flat(body) is None


def test_a_body_that_contains_one_text_many_times_is_refused_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise AssertionError("it is written")

    monkeypatch.setattr(jsontext.orjson, "dumps", fail)  # type: ignore[attr-defined]
    with pytest.raises(BodyTooLargeError):
        encode_body(dict.fromkeys(map(str, range(200)), "x" * 1_000_000), 256_000)


@pytest.mark.parametrize("value", [{1, 2}, b"x", object()], ids=lambda value: type(value).__name__)
def test_both_encoders_refuse_values_without_a_json_form(
    value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError):
        dump_json(value)
    monkeypatch.setattr(jsontext, "orjson", None)
    with pytest.raises(TypeError):
        dump_json(value)
