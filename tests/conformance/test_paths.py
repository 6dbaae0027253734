"""How many files of the package run code on the path of one task: a reader opens that many."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import delaytasks
from delaytasks import DelayedTask
from tests.world import Entry, MainProcess, Worker, World, run_chunk

PACKAGE = Path(delaytasks.__file__).parent
#: The goals are 10 files to schedule, 6 to claim and settle, and 12 for a run.
MOST_FILES = {"schedule": 10, "claim": 4, "run": 12, "main": 25}


def files_of(work: Callable[[], object]) -> set[str]:
    """Return the files of the package whose functions `work` calls, in all threads it starts."""
    names: set[str] = set()

    def observe(frame: Any, event: str, _: object) -> None:
        names.add(frame.f_code.co_filename)

    threading.setprofile(observe)
    sys.setprofile(observe)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = (Path(name) for name in names if name.startswith(f"{PACKAGE}/"))
    return {path.relative_to(PACKAGE).as_posix() for path in paths}


def claim_and_settle(worker: Worker, entry: Entry) -> None:
    worker.end(worker.claim(entry))


def test_the_path_of_a_task_leads_through_few_files(world: World) -> None:
    if world.url.get_driver_name() != "psycopg2":
        pytest.skip("the files of one driver are counted")
    main, worker, found = MainProcess(world), world.worker(), list[dict[str, set[str]]]()

    def lead_to_the_end(task: DelayedTask) -> None:
        """Lead a due message to the finished row."""
        main.take([Entry.of(task)])
        main.pump()
        assert main.sizes() == [1]
        main.pool.end(run_chunk(world, task))
        main.pump()

    # The first calls open connections and compile statements, and policies are read once a second.
    for _ in range(4):
        seen = dict[str, set[str]]()
        claimed, run, led = [world.put(due_s=-0.01) for _ in range(3)]
        entries = [Entry.of(claimed)], [Entry.of(run)]
        seen["schedule"] = files_of(lambda: world.delays.schedule_delay("note", {"n": 1}, 60))
        seen["claim"] = files_of(partial(claim_and_settle, worker, *entries[0]))
        seen["run"] = files_of(partial(worker.run_entries, entries[1]))
        seen["main"] = files_of(partial(lead_to_the_end, led))
        assert world.statuses([claimed, run, led]) == ["DONE"] * 3
        found.append(seen)
    seen = {name: min((one[name] for one in found), key=len) for name in MOST_FILES}
    assert not {name: sorted(seen[name]) for name in seen if len(seen[name]) > MOST_FILES[name]}


def test_a_file_is_found_by_its_name_alone() -> None:
    names = Counter(path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []
