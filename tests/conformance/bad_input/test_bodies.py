"""Bodies that JSON or a database cannot represent."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any

import pytest

from delaytasks.core import errors as e
from tests.conformance.bad_input.refusing_client import (
    SQL,
    UNSTORABLE,
    UTC,
    RefusingClient,
    Unsayable,
)


def nested(depth: int) -> list[Any]:
    body: list[Any] = []
    for _ in range(depth - 1):
        body = [body]
    return body


def cycle() -> dict[str, Any]:
    body: dict[str, Any] = {"a": []}
    body["a"].append(body)
    return body


NOT_JSON = [
    ({1, 2}, "$"),
    ({"a": [1, b"x"]}, "$.a[1]"),
    ([0.5, float("nan")], "$[1]"),
    (float("inf"), "$"),
    ({"a": {1: 2}}, "$.a"),
    ({None: 2}, "$"),
    ({"a": ({}, {True: 1})}, "$.a[1]"),
    (cycle(), "$.a[0]"),
    (nested(101), "$[0]"),
    (nested(100_000), "$[0]"),
    ({"price": Decimal("1.5")}, "$.price"),
    ([datetime(2030, 1, 1, tzinfo=UTC)], "$[0]"),
    ([uuid.uuid4()], "$[0]"),
    ({"f": print}, "$.f"),
    (Unsayable(), "$"),
    ({"n": [10**5000]}, "$.n[0]"),
    (range(3), "$"),
]


def test_a_body_without_a_json_form_is_refused_with_the_path_of_the_bad_value(
    place: RefusingClient,
) -> None:
    for body, where in NOT_JSON:
        with place.refuses(e.BodyNotJSONError, where):
            place.delays.schedule_delay("mail", body, 5)
        with place.refuses(e.BodyNotJSONError, where):
            place.delays.schedule_many([("mail", {}, 5), ("mail", body, 5)])
        with place.refuses(e.BodyNotJSONError, where):
            place.delays.schedule_delay("mail", body, 5, key="k", on_conflict="replace")


def test_a_body_a_hundred_deep_is_accepted(place: RefusingClient) -> None:
    task = place.delays.schedule_delay("mail", nested(100), 60)
    assert place.delays.get(task).body == nested(100)


@pytest.mark.parametrize(
    "second", [object(), float("nan"), nested(100_000)], ids=lambda s: type(s).__name__
)
def test_a_body_that_changes_while_it_is_written_is_refused(
    place: RefusingClient, second: Any
) -> None:
    class TwoFaced(list):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            face, self.face = getattr(self, "face", 1), second
            return iter([face])

    with place.refuses(e.BodyNotJSONError):
        place.delays.schedule_delay("mail", TwoFaced([1]), 5)


def test_a_body_is_measured_in_bytes(make: Callable[..., RefusingClient]) -> None:
    place = make(max_body_bytes=1000)
    for body in ("a" * 998, "é" * 499, "😀" * 249 + "aa"):
        task = place.delays.schedule_delay("mail", body, 60)
        assert place.delays.get(task).body == body
        with place.refuses(e.BodyTooLargeError, "1,000 bytes"):
            place.delays.schedule_delay("mail", body + "b", 60)


def test_a_body_of_the_default_size_fits_every_database(place: RefusingClient) -> None:
    body = "😀" * 65_535 + "a" * 2
    task = place.delays.schedule_delay("mail", body, 60)
    assert place.delays.get(task).body == body
    assert place.delays.schedule_many([("mail", body, 60)] * 3) == 3
    with place.refuses(e.BodyTooLargeError, "262,144"):
        place.delays.schedule_delay("mail", body + "b", 60)


def test_a_body_that_contains_one_part_many_times_is_refused_without_expanding_it(
    place: RefusingClient,
) -> None:
    body: list[Any] = ["x"]
    for _ in range(90):
        body = [body, body]
    with place.refuses(e.BodyTooLargeError):
        place.delays.schedule_delay("mail", body, 5)


def test_text_that_one_database_cannot_store_is_refused_on_every_database(
    place: RefusingClient,
) -> None:
    for bad in UNSTORABLE:
        for body in (bad, [bad], {"a": bad}, {bad: 1}):
            with place.refuses(e.BodyNotStorableError, "$"):
                place.delays.schedule_delay("mail", body, 5)
        with place.refuses(e.BodyNotStorableError, "tag"):
            place.delays.schedule_delay("mail" + bad, {}, 5)
        with place.refuses(e.BodyNotStorableError, "key"):
            place.delays.schedule_delay("mail", {}, 5, key=bad)
        with place.refuses(e.BodyNotStorableError, "queue"):
            place.delays.schedule_delay("mail", {}, 5, queue=bad)
        with place.refuses(e.BodyNotStorableError):
            place.delays.find(tag=bad)
        with place.refuses(e.BodyNotStorableError):
            place.delays.cancel(tag="mail", key=bad)


def test_text_that_only_looks_unstorable_is_stored(place: RefusingClient) -> None:
    body = {"\\u0000": "\\ud800", "\x01\x1f\x7f": "\ufffe\ufeff\u2028"}
    assert place.delays.get(place.delays.schedule_delay("mail", body, 60)).body == body


def test_integers_are_exact(place: RefusingClient) -> None:
    body = [2**53 + 1, -(2**53) - 1, 2**63, 2**64 + 1, -(10**40), 10**4000, {"n": 9007199254740993}]
    task = place.delays.schedule_delay("mail", body, 60)
    assert place.delays.get(task).body == body
    assert place.delays.get(task).as_json()["body"] == body


def test_sql_in_tag_key_and_body_is_stored_literally(place: RefusingClient) -> None:
    ran: list[Any] = []
    place.delays.processor(SQL)(ran.append)
    task = place.delays.schedule_delay(SQL, {SQL: SQL}, 0, key=SQL)
    many = place.delays.schedule_many([(SQL, SQL, 60)] * 3)
    assert (many, len(place.delays.find(tag=SQL))) == (3, 4)
    found = place.delays.get(tag=SQL, key=SQL)
    assert (found.id, found.tag, found.key, found.body) == (task.id, SQL, SQL, {SQL: SQL})
    place.delays.runner().run([place.timer.armed[0]])
    assert ran == [{SQL: SQL}]
    assert not place.delays.find(tag="' OR '1'='1").tasks
