"""The options and the fields of a task are the same in Python, in the command line and in HTTP."""

from __future__ import annotations

import re
from dataclasses import fields
from datetime import datetime, timezone

from delaytasks import DelayTask, NewTask
from delaytasks.cli.schedule_commands import schedule
from delaytasks.core.task import TaskOptions
from delaytasks.http_api.schemas import TASK

OPTIONS = set(TaskOptions.__annotations__)
#: Each way to schedule a task has these arguments in a form of its own.
ARGUMENTS = {"tag", "body", "delay", "at"}
#: The JSON value of a task does not have these fields.
HIDDEN = {"cancel_request"}


def test_schedule_many_takes_the_options_of_schedule_delay() -> None:
    assert set(NewTask._fields) == OPTIONS | ARGUMENTS


def test_the_command_has_the_options() -> None:
    parameters = {parameter.name for parameter in schedule.params}
    # The command line has the version of the processor, or 1.
    assert parameters >= OPTIONS - {"body_version"}
    help_text = re.sub(r"\s+", " ", schedule.help or "")
    named = re.search(r"further options of the task \((.*?)\)", help_text)
    assert named is not None
    assert set(named[1].split(", ")) == OPTIONS - {"body_version"}


def test_the_json_value_of_a_task_has_its_fields() -> None:
    task = DelayTask(1, "tag", "null", datetime(2030, 1, 31, tzinfo=timezone.utc))
    names = {field.name.removesuffix("_json") for field in fields(DelayTask)} - HIDDEN
    assert set(task.as_json()) == {"ip_address" if name == "ip" else name for name in names}
    assert set(TASK["properties"]) <= set(task.as_json())
