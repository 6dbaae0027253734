"""The path of a task from a request of the pool to its processor has few stack frames."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import delaytasks
from delaytasks import DelayedTask, DelayTasks, Status
from delaytasks.core.interfaces import Entry
from delaytasks.runtime import runtime_of
from delaytasks.worker import chunk_request
from delaytasks.worker.chunk_request import ChunkRequest, run_chunk
from tests.conftest import open_store
from tests.recording import delays_on

MAX_FRAMES = 6
PACKAGE = str(Path(delaytasks.__file__).parent)
Frames = list[str]


def own_frames() -> Frames:
    """Return the functions of the package on the call stack."""
    return [
        f"{Path(frame.filename).stem}.{frame.name}"
        for frame in traceback.extract_stack()
        if frame.filename.startswith(PACKAGE)
    ]


@pytest.fixture
def delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DelayTasks]:
    url = f"sqlite:///{tmp_path / 'frames.sqlite3'}"
    open_store(url).close()
    made = delays_on(url)
    monkeypatch.setattr(chunk_request, "current_app", runtime_of(made).celery)
    yield made
    made.close()


def request_of(kind: str, task: DelayedTask) -> ChunkRequest:
    if kind == "message":
        return ChunkRequest((Entry.of(task),), serve_s=1)
    return ChunkRequest((), task.queue, priorities=(task.priority,), limit=10, serve_s=1)


@pytest.mark.parametrize("kind", ["message", "drain"])
@pytest.mark.parametrize("mode", ["single", "batch", "in_flight"])
def test_a_job_calls_a_processor_within_six_frames(
    delays: DelayTasks, kind: str, mode: str
) -> None:
    seen: list[Frames] = []
    options: dict[str, Any] = {"batch": {"batch": 10}, "in_flight": {"in_flight": 2}}.get(mode, {})
    delays.processor("look", **options)(lambda given: seen.append(own_frames()))
    task = delays.schedule_delay("look", None, 0)
    report = run_chunk(request_of(kind, task))
    assert report.error == ""
    assert delays.get(task).status is Status.DONE
    [frames] = seen
    assert len(frames) <= MAX_FRAMES, frames
    # A row in flight begins in its own thread.
    if mode != "in_flight":
        assert frames[0] == "chunk_request.run_chunk"
