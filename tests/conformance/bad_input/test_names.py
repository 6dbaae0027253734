"""Invalid tags, keys, queues and priorities."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import pytest

from delaytasks import NewTask
from delaytasks.core import errors as e
from tests.conformance.bad_input.refusing_client import BAD_NAMES, RefusingClient, Unsayable


def by_tag(place: RefusingClient, tag: Any) -> list[Callable[[], Any]]:
    return [
        lambda: place.delays.schedule_delay(tag, {}, 5),
        lambda: place.delays.schedule_many([("mail", {}, 5), (tag, {}, 5)]),
        lambda: place.delays.processor(tag),
    ]


def by_key(place: RefusingClient, key: Any) -> list[Callable[[], Any]]:
    return [
        lambda: place.delays.schedule_delay("mail", {}, 5, key=key),
        lambda: place.delays.schedule_many(
            [NewTask("mail", {}, 5), NewTask("mail", {}, 5, key=key)]
        ),
        lambda: place.delays.cancel(tag="mail", key=key),
        lambda: place.delays.get(tag="mail", key=key),
        lambda: place.delays.touch(tag="mail", key=key, delay=5),
        lambda: place.delays.touch_many(tag="mail", keys=["k", key], delay=5),
        lambda: place.delays.find(key=key),
    ]


def by_queue(place: RefusingClient, queue: Any) -> list[Callable[[], Any]]:
    return [
        lambda: place.delays.schedule_delay("mail", {}, 5, queue=queue),
        lambda: place.delays.schedule_many(
            [NewTask("mail", {}, 5), NewTask("mail", {}, 5, queue=queue)]
        ),
        lambda: place.delays.processor("mail", queue=queue),
    ]


def test_a_tag_that_is_no_name_is_refused(place: RefusingClient) -> None:
    for tag in [*BAD_NAMES, "x" * 129]:
        for call in by_tag(place, tag):
            with place.refuses(e.InvalidTagError):
                call()
        if tag is not None:
            with place.refuses(e.InvalidTagError):
                place.delays.find(tag=tag)


def test_a_key_that_is_no_name_is_refused(place: RefusingClient) -> None:
    for key in [*(name for name in BAD_NAMES if name is not None), "x" * 192]:
        for call in by_key(place, key):
            with place.refuses(e.InvalidKeyError):
                call()


def test_a_queue_that_a_broker_could_not_have_is_refused(place: RefusingClient) -> None:
    for_paths_and_patterns = [
        "a b",
        "../../etc/passwd",
        "a/b",
        "😀" * 90,
        "q*",
        "q#",
        "a:b",
        "x" * 101,
    ]
    for queue in [*(name for name in BAD_NAMES if name is not None), *for_paths_and_patterns]:
        for call in by_queue(place, queue):
            with place.refuses(e.InvalidQueueError):
                call()


def test_names_at_their_longest_are_accepted(place: RefusingClient) -> None:
    tag, key, queue = "😀" * 128, "ü" * 191, "q" * 100
    task = place.delays.schedule_delay(tag, {}, 60, key=key, queue=queue)
    found = place.delays.get(tag=tag, key=key)
    assert (found.id, found.tag, found.key, found.queue) == (task.id, tag, key, queue)


class Name(str, enum.Enum):
    MAIL = "mail"
    KEY = "the key"


class Level(int, enum.Enum):
    HIGH = 9
    ID = 4711


def test_an_enum_member_is_stored_as_its_value(place: RefusingClient) -> None:
    task = place.delays.schedule_delay(
        Name.MAIL,
        {"level": Level.HIGH, "name": Name.KEY},
        60,
        key=Name.KEY,
        priority=Level.HIGH,
        id=Level.ID,
    )
    assert (task.tag, task.key, task.priority, task.id) == ("mail", "the key", 9, 4711)
    # The values must have plain types. A driver may write a subclass by its `str()`, "Name.MAIL".
    assert [type(value) for value in (task.tag, task.key, task.priority, task.id)] == [
        str,
        str,
        int,
        int,
    ]
    found = place.delays.get(tag="mail", key="the key")
    assert (found.id, found.priority, found.body) == (4711, 9, {"level": 9, "name": "the key"})
    assert place.delays.get(Level.ID).tag == "mail"
    assert [one.id for one in place.delays.find(tag=Name.MAIL)] == [4711]


def test_a_priority_is_an_integer_from_0_to_9(place: RefusingClient) -> None:
    for priority in [-1, 10, True, 1.0, "1", None, 10**5000, Unsayable()]:
        with place.refuses(e.InvalidPriorityError):
            place.delays.schedule_delay("mail", {}, 5, priority=priority)
        with place.refuses(e.InvalidPriorityError):
            place.delays.schedule_many([NewTask("mail", {}, 5, priority=priority)])


def test_a_process_with_processors_refuses_other_tags_and_names_the_nearest(
    make: Callable[..., RefusingClient],
) -> None:
    place = make()
    place.delays.schedule_delay("nobody", {}, 5)
    place.delays.processor("mail.send")(lambda body: None)
    place.delays.schedule_delay("mail.send", {}, 5)
    with place.refuses(e.UnknownTagError, "'mail.sent'", "did you mean 'mail.send'?"):
        place.delays.schedule_delay("mail.sent", {}, 5)
    with place.refuses(e.UnknownTagError):
        place.delays.schedule_many([("mail.send", {}, 5), ("mail.sent", {}, 5)])


@pytest.mark.parametrize(
    ("settings", "has_processor", "accepted"),
    [
        ({}, False, "send sent"),
        ({"tags": ["mail.sent"]}, False, "sent"),
        ({"tags": ["mail.sent"]}, True, "send sent"),
        ({"tags": ["mail.sent"], "strict_tags": False}, True, "send sent"),
        ({"strict_tags": False}, True, "send sent"),
        ({"strict_tags": True}, True, "send"),
        ({"strict_tags": True}, False, ""),
        ({"strict_tags": True, "tags": ["mail.sent"]}, False, "sent"),
    ],
)
def test_the_settings_tags_and_strict_tags_decide_about_other_tags(
    make: Callable[..., RefusingClient], settings: Any, has_processor: bool, accepted: str
) -> None:
    place = make(**settings)
    if has_processor:
        place.delays.processor("mail.send")(lambda body: None)
    for name in ("send", "sent"):
        if name in accepted.split():
            place.delays.schedule_delay(f"mail.{name}", {}, 5)
        else:
            with place.refuses(e.UnknownTagError, f"mail.{name}"):
                place.delays.schedule_delay(f"mail.{name}", {}, 5)


def test_a_concurrency_key_is_a_key_and_may_be_long(place: RefusingClient) -> None:
    for key in ["", " ", "a ", "a" * 256, "a\nb", 7, True]:
        with place.refuses(e.InvalidKeyError, "concurrency_key"):
            place.delays.schedule_delay("mail", {}, 5, concurrency_key=key)
    assert (
        place.delays.schedule_delay("mail", {}, 5, concurrency_key="a" * 255).concurrency_key
        == "a" * 255
    )


def test_a_processor_computes_the_concurrency_key_unless_the_call_names_one(
    place: RefusingClient,
) -> None:
    place.delays.processor("pay", concurrency_key=lambda body: body["customer"])(lambda body: None)
    schedule = place.delays.schedule_delay
    assert place.delays.get(schedule("pay", {"customer": "c7"}, 5)).concurrency_key == "c7"
    assert (
        place.delays.get(
            schedule("pay", {"customer": "c7"}, 5, concurrency_key="own")
        ).concurrency_key
        == "own"
    )
    assert place.delays.get(schedule("pay", {"customer": None}, 5)).concurrency_key is None
    with place.refuses(e.InvalidKeyError, "concurrency_key"):
        schedule("pay", {"customer": 7}, 5)
