"""A row becomes a task by the positions of its columns."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime, timezone

import pytest

from delaytasks.core.task import DelayTask
from delaytasks.storage.rows import CLAIMED, COLUMNS, NEW_COLUMNS, PLAIN_COLUMNS, columns_of
from delaytasks.storage.schema import build_schema

#: The columns whose field of `DelayTask` has another name.
OTHER_NAMES = {
    "message_body": "body_json",
    "task_key": "key",
    "delay_time": "delay_s",
    "headers": "headers_json",
    "meta": "meta_json",
    "ip_address": "ip",
    "error_stack": "error",
    "result": "result_json",
}


def test_columns_have_the_order_of_the_fields_of_a_task() -> None:
    names = [OTHER_NAMES.get(column, column) for column in COLUMNS]
    assert names == [field.name for field in fields(DelayTask)]


def test_each_column_of_the_table_is_read() -> None:
    assert sorted(COLUMNS) == sorted(build_schema().tasks.columns.keys())


def test_each_column_of_a_new_row_is_read_by_workers_or_is_its_last_change() -> None:
    assert set(NEW_COLUMNS) - set(CLAIMED) == {"update_time"}


@pytest.mark.parametrize("column", sorted(set(NEW_COLUMNS) - set(PLAIN_COLUMNS)))
def test_a_column_that_most_tasks_leave_out_is_written_if_one_has_a_value(column: str) -> None:
    plain = DelayTask(1, "tag", "null", datetime(2030, 1, 31, tzinfo=timezone.utc))
    full = replace(plain, **{OTHER_NAMES.get(column, column): "value"})
    assert columns_of([plain, plain]) == PLAIN_COLUMNS
    assert columns_of([plain, full]) == NEW_COLUMNS
