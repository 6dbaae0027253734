"""Invalid rows that other programs write."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from delaytasks import Status
from delaytasks.core import errors as e
from delaytasks.runtime import runtime_of
from delaytasks.storage.types import db_now_plus
from tests.conformance.bad_input.refusing_client import UTC, RefusingClient
from tests.counting import counted


def test_rows_with_invalid_values_break_neither_a_claim_nor_the_api(
    make: Callable[..., RefusingClient],
) -> None:
    place = make(chunk_time_budget_s=15)
    ran: list[Any] = []
    place.delays.processor("mail")(ran.append)
    before = {"expected_time": db_now_plus(-10)}
    not_json = place.insert(message_body="{'a': nope", **before)
    empty_body = place.insert(message_body="", **before)
    deep = place.insert(message_body="[" * 100_000, **before)
    nan = place.insert(message_body="NaN", **before)
    huge = place.insert(message_body=json.dumps("x" * 5_000_000), **before)
    empty_tag = place.insert(tag="", **before)
    nasty_tag = place.insert(tag="\x1b[31m\r\nx", **before)
    negative = place.insert(version=-5, **before)
    far = place.insert(expected_time=datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC))
    odd_queue = place.insert(queue="", priority=-7, **before)
    below_zero = place.insert(id=-4, **before)
    good = place.insert(message_body="7", **before)
    everything = {not_json, empty_body, deep, nan, huge, empty_tag, nasty_tag, negative}
    everything |= {far, odd_queue, below_zero, good}

    report = place.delays.runner().run_due("default", [0], 100)
    assert report.claimed == 10

    by_id = {task.id: task for task in place.delays.find(limit=100)}
    assert set(by_id) == everything
    assert all(json.dumps(task.as_json()) for task in by_id.values())
    failed = {id for id, task in by_id.items() if task.status is Status.FAILED}
    assert failed == {not_json, empty_body, deep}
    assert "JSONDecodeError" in (by_id[not_json].error or "")
    assert {by_id[id].status for id in (nan, huge, negative, below_zero, good)} == {Status.DONE}
    assert len(ran) == 5
    for id in (empty_tag, nasty_tag):
        assert by_id[id].status is Status.NOT_COMPLETE
        assert "no such processor" in (by_id[id].error or "")
    assert by_id[far].status is Status.NOT_COMPLETE
    assert counted(runtime_of(place.delays).store)[Status.DONE] == 5
    assert place.delays.cancel(far)


def test_a_row_of_an_unknown_status_is_shown_and_never_changed(place: RefusingClient) -> None:
    odd = place.insert(status=77, ip_address=-3, worker="", expected_time=db_now_plus(-10))
    assert place.delays.runner().run_due("default", [0], 100).claimed == 0
    task = place.delays.get(odd)
    assert (task.status.name, int(task.status), task.ip_address) == ("UNKNOWN_77", 77, "-3")
    assert not task.is_finished
    assert json.dumps(task.as_json())
    for call in (
        place.delays.cancel,
        place.delays.rerun,
        lambda id: place.delays.reschedule(id, 5),
    ):
        with place.refuses(e.InvalidStatusError, "UNKNOWN_77"):
            call(odd)
    assert not place.delays.touch(odd, 5)
    assert list(Status) == [Status(n) for n in range(6)], "no status was added"


def test_a_row_with_invalid_values_does_not_prevent_the_arming_of_other_rows(
    place: RefusingClient,
) -> None:
    soon = {"expected_time": db_now_plus(5)}
    strange = [
        place.insert(version=-5, **soon),
        place.insert(id=-4, **soon),
        place.insert(queue="\x00"[:0], **soon),
    ]
    good = place.put(delay=5)
    entries = [
        entry
        for some in runtime_of(place.delays).store.sweeps.due_between(*near_window(place), 0, 1)
        for entry in some
    ]
    assert {entry.id for entry in entries} == {*strange, good.id}
    sent: list[Any] = []
    runtime_of(place.delays).publisher.send = lambda name, queue, messages: (  # type: ignore[method-assign]
        bool(sent.extend(messages)) or True
    )
    assert runtime_of(place.delays).timer.arm(entries)
    from delaytasks.timers.eta import read_message

    armed = [entry for args, _ in sent for entry in read_message(args, "q")[0]]
    assert good.id in [entry.id for entry in armed]


def near_window(place: RefusingClient) -> tuple[datetime, datetime]:
    now = runtime_of(place.delays).clock.now()
    return now, now + timedelta(seconds=30)
