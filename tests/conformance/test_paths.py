"""How many files of the package run code on the path of one task, so that a reader can follow it.

The world is warm: connections are open and policies are read.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import delaytasks
from tests.world import Entry, MainProcess, World, run_chunk

_PACKAGE = Path(delaytasks.__file__).parent


def files_of(work: Callable[[], object]) -> set[str]:
    """Return the files of the package whose code `work` runs, in all threads."""
    names: set[str] = set()

    def observe(frame: Any, event: str, _: object) -> None:
        if event == "call":
            names.add(frame.f_code.co_filename)

    threading.setprofile(observe)
    sys.setprofile(observe)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    inside = (Path(name) for name in names if name.startswith(f"{_PACKAGE}/"))
    return {path.relative_to(_PACKAGE).as_posix() for path in inside}


def schedule(world: World) -> None:
    world.delays.schedule_delay("note", {"n": 1}, 60)


def claim_and_settle(world: World, task: Any) -> None:
    worker = world.worker()
    worker.end(worker.claim(task))


def take_and_run(main: MainProcess, task: Any) -> None:
    """Lead one due message to the finished row."""
    main.take([Entry.of(task)])
    main.pump()
    report = run_chunk(main.world, task)
    main.pool.end(report)
    main.pump()


MOST_FILES = {"schedule": 10, "claim": 6, "run": 12, "main": 12}


def test_a_task_passes_few_files(world: World) -> None:
    main = MainProcess(world)
    seen: dict[str, set[str]] = {}
    for _ in range(3):  # the first calls open connections and compile statements
        tasks = [world.put() for _ in range(3)]
        seen["schedule"] = files_of(lambda: schedule(world))
        seen["claim"] = files_of(lambda task=tasks[0]: claim_and_settle(world, task))
        seen["run"] = files_of(lambda task=tasks[1]: world.run(task))
        seen["main"] = files_of(lambda task=tasks[2]: take_and_run(main, task))
    for name, files in seen.items():
        print(f"\n{name}: {len(files)}: {' '.join(sorted(files))}")
    assert {name: len(files) for name, files in seen.items() if len(files) > MOST_FILES[name]} == {}
