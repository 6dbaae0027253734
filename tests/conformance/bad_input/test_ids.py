"""Ids and keys that are invalid, unknown or taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from delaytasks import NewTask, Status
from delaytasks.core import errors as e
from tests.conformance.bad_input.refusing_client import BAD_NAMES, RefusingClient, Unsayable


def by_id(place: RefusingClient, id: Any) -> list[Callable[[], Any]]:
    return [
        lambda: place.delays.get(id),
        lambda: place.delays.cancel(id, strict=True),
        lambda: place.delays.reschedule(id, 5),
        lambda: place.delays.touch(id, 5),
        lambda: place.delays.rerun(id),
    ]


BAD_IDS = [
    0,
    -1,
    2**63,
    2**64,
    10**5000,
    "9" * 5000,
    True,
    "1 OR 1=1",
    "",
    "-1",
    "1.0",
    "٣",
    1.0,
    b"1",
    [1],
    Unsayable(),
]


def test_an_id_that_is_no_id_is_refused_by_every_call(place: RefusingClient) -> None:
    task = place.put()
    for id in BAD_IDS:
        with place.refuses(e.InvalidIdError):
            place.delays.cancel(id)
        with place.refuses(e.InvalidIdError):
            place.delays.touch_many([task, id], 500)  # type: ignore[list-item]
        for call in by_id(place, id):
            with place.refuses(e.InvalidIdError):
                call()
        with place.refuses(e.InvalidIdError):
            place.delays.schedule_delay("mail", {}, 5, id=id)
        with place.refuses(e.InvalidIdError):
            place.delays.schedule_many([NewTask("mail", {}, 5), NewTask("mail", {}, 5, id=id)])


def test_every_call_reports_an_unknown_id_as_not_found(place: RefusingClient) -> None:
    for id in [1, 2**63 - 1, "4711"]:
        for call in by_id(place, id):
            with place.refuses(e.TaskNotFoundError, str(id)):
                call()


def test_every_call_reports_an_unknown_key_as_not_found(place: RefusingClient) -> None:
    d, name = place.delays, {"tag": "mail", "key": "k"}
    for call in (
        lambda: d.get(**name),
        lambda: d.cancel(strict=True, **name),
        lambda: d.reschedule(delay=5, **name),
        lambda: d.touch(delay=5, **name),
    ):
        with place.refuses(e.TaskNotFoundError, "'mail'", "'k'"):
            call()


def test_a_task_is_named_in_one_way(place: RefusingClient) -> None:
    task = place.put(key="k")
    for names in ({}, {"key": "k"}, {"tag": "mail"}, {"task": task, "tag": "mail", "key": "k"}):
        with place.refuses(e.InvalidScheduleError):
            place.delays.cancel(**names)


def test_touch_many_takes_one_list(place: RefusingClient) -> None:
    task = place.put(key="k")
    for names in (
        {},
        {"tag": "mail"},
        {"keys": ["k"]},
        {"tasks": [task], "tag": "mail"},
        {"tasks": [task], "tag": "mail", "keys": ["k"]},
        *({"tasks": tasks} for tasks in (task, task.id, str(task.id), b"1", Unsayable())),
        *({"tag": "mail", "keys": keys} for keys in ("k", b"k", 5)),
    ):
        with place.refuses(e.InvalidScheduleError):
            place.delays.touch_many(delay=500, **names)
    for tag in BAD_NAMES[:-4]:
        with place.refuses(e.InvalidTagError):
            place.delays.touch_many(tag=tag, keys=["k"], delay=500)
    assert place.delays.get(task).expected_time == task.expected_time


def test_a_key_that_is_taken_names_the_task_that_has_it(place: RefusingClient) -> None:
    first = place.put(key="k")
    with place.refuses(e.DuplicateTaskError, str(first.id), "'k'"):
        place.delays.schedule_delay("mail", {}, 5, key="k")
    with pytest.raises(e.DuplicateTaskError) as caught:
        place.delays.schedule_delay("mail", {}, 5, key="k")
    assert caught.value.id == first.id


def test_schedule_many_inserts_no_task_if_one_key_is_taken(place: RefusingClient) -> None:
    place.put(key="k")
    with place.refuses(e.DuplicateTaskError):
        place.delays.schedule_many(
            [
                NewTask("mail", {}, 5),
                NewTask("mail", {}, 5, key="l"),
                NewTask("mail", {}, 5, key="k"),
            ]
        )


def test_a_typo_in_on_conflict_is_refused(place: RefusingClient) -> None:
    place.put(key="k")
    typos: list[Any] = ["Reject", "ignore", "", None, 1, [], Unsayable()]
    for typo in typos:
        with place.refuses(e.InvalidScheduleError, "on_conflict"):
            place.delays.schedule_delay("mail", {}, 5, key="k", on_conflict=typo)
        with place.refuses(e.InvalidScheduleError, "on_conflict"):
            place.delays.schedule_many([NewTask("mail", {}, 5, key="k")], on_conflict=typo)


def test_scheduling_the_same_id_again_changes_nothing_and_arms_the_task_again(
    place: RefusingClient,
) -> None:
    first = place.delays.schedule_delay("mail", {"n": 1}, 5, id=4711)
    before = place.traces()
    again = place.delays.schedule_delay("mail", {"n": 2}, 60, id=4711)
    assert (again.id, again.body, again.expected_time) == (4711, {"n": 1}, first.expected_time)
    # A caller repeats an id if the result of the first call is unknown, so the row may not be
    # armed.
    assert place.traces() == (*before[:-1], before[-1] + 1)
    place.delays.cancel(4711)
    place.delays.schedule_delay("mail", {"n": 2}, 0, id=4711)
    assert place.timer.ids == [4711, 4711]
    assert place.delays.get(4711).status is Status.CANCELLED
