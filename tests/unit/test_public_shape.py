"""The size of the public API. A new name needs a user, and makes another name unnecessary."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import fields

import pytest

import delaytasks
from delaytasks import DelayTasks
from delaytasks.cli.main import main
from delaytasks.model import errors
from delaytasks.settings import Settings
from tests.running import ROOT
from tests.unit.test_cli import commands

#: The names of the package, without the errors.
VALUES = """
Attempt BulkResult Cancel CancelResult DelayedTask DelayTasks Done Fail Finding Forecast LogEntry
NewTask Outcome Page Policy Processor RecurringSchedule Retry RetrySchedule Shards Snooze Status
TouchResult
""".split()
FUNCTIONS = "aschedule_delay current_delays processor schedule_delay".split()


def test_the_package_has_these_names() -> None:
    assert sorted({*delaytasks.__all__} - {*errors.__all__}) == sorted([*VALUES, *FUNCTIONS])
    assert {*errors.__all__} < {*delaytasks.__all__}
    for name in delaytasks.__all__:
        assert getattr(delaytasks, name).__doc__, f"{name} has no docstring"
    with pytest.raises(AttributeError, match="no attribute 'cancel'"):
        _ = delaytasks.cancel


def methods() -> list[str]:
    """Return the public names of `DelayTasks`, without the asynchronous twins."""
    names = {name for name in dir(DelayTasks) if not name.startswith("_")}
    twins = {f"a{name}" for name in names} | {"await_"}
    return sorted(names - twins)


def test_the_reference_lists_each_public_name() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    members = page.partition("::: delaytasks.DelayTasks\n")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"- (\w+)$", members, re.MULTILINE)) == methods()


TERMS = ROOT / "docs/tables-and-terms.md"
#: What is counted, its names, and the most of them.
LIMITS: list[tuple[str, Callable[[], Collection[str]], int]] = [
    ("names of DelayTasks", methods, 26),
    ("functions of the package", lambda: FUNCTIONS, 4),
    ("errors", lambda: errors.__all__, 20),
    ("terms", lambda: re.findall("^### (.+)", TERMS.read_text(), re.MULTILINE), 30),
    ("commands", lambda: [path for path, _ in commands(main)], 22),
    ("settings", lambda: [each.name for each in fields(Settings) if each.metadata], 27),
]


@pytest.mark.parametrize(("what", "names", "most"), LIMITS, ids=[each[0] for each in LIMITS])
def test_the_api_stays_small(what: str, names: Callable[[], Collection[str]], most: int) -> None:
    found = names()
    assert len(found) <= most, f"{len(found)} {what}: {', '.join(found)}"
