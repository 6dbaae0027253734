"""Invalid rows that other programs write."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from delaytasks import Status
from delaytasks.runtime import runtime_of
from delaytasks.storage.types import db_now_plus
from tests.conformance.bad_input.refusing_client import UTC, RefusingClient
from tests.recording import counted


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
    nasty_tag = place.insert(tag="\x1b[31m\r\nx", **before)
    far = place.insert(expected_time=datetime(9999, 12, 30, 23, 59, 59, tzinfo=UTC))
    below_zero = place.insert(id=-4, **before)
    good = place.insert(message_body="7", **before)
    everything = {not_json, empty_body, deep, nan, huge, nasty_tag}
    everything |= {far, below_zero, good}

    report = place.delays.runner().run_due("default", [0], 100)
    assert report.claimed == 8

    by_id = {task.id: task for task in place.delays.find(limit=100)}
    assert set(by_id) == everything
    assert all(json.dumps(task.as_json()) for task in by_id.values())
    failed = {id for id, task in by_id.items() if task.status is Status.FAILED}
    assert failed == {not_json, empty_body, deep}
    assert "JSONDecodeError" in (by_id[not_json].error or "")
    assert {by_id[id].status for id in (nan, huge, below_zero, good)} == {Status.DONE}
    assert len(ran) == 4
    assert by_id[nasty_tag].status is Status.NOT_COMPLETE
    assert "no such processor" in (by_id[nasty_tag].error or "")
    assert by_id[far].status is Status.NOT_COMPLETE
    assert counted(runtime_of(place.delays).store)[Status.DONE] == 4
    assert place.delays.cancel(far)
