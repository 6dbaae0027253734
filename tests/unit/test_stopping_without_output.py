"""A worker obeys SIGTERM although nobody reads its output any more."""

from __future__ import annotations

from typing import Any

import pytest
from celery.apps import worker as celery_worker

from delaytasks.worker import celery_patches as versions


@pytest.mark.parametrize("celery", [(5, 5), (5, 6)])
def test_a_signal_handler_goes_on_if_its_line_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, celery: tuple[int, int]
) -> None:
    said: list[Any] = []

    def say(*args: Any) -> None:
        said.append(args)
        raise BrokenPipeError

    monkeypatch.setattr(versions, "_CELERY", celery)
    monkeypatch.setattr(celery_worker, "safe_say", say)
    versions.obey_signals_without_output()
    celery_worker.safe_say("worker: Warm shutdown", None)
    assert said == [("worker: Warm shutdown", None)]
