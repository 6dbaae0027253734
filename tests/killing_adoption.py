"""Kill `delaytasks adopt-eta` at the step DELAYTASKS_TEST_KILL_ADOPTION of its second batch.

Without this variable, only the batches are small.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import delaytasks.cli.adopt_eta as command
from delaytasks.durable_eta.waiting_message import FoundMessage, MessageSource
from delaytasks.operations.eta_adoption import EtaAdoption

STEP = os.environ.get("DELAYTASKS_TEST_KILL_ADOPTION", "")
STEPS = ("read", "written", "removing", "removed")
#: The number of batches that were read in this process.
batches = 0


class Deadly:
    """A source that kills the process."""

    def __init__(self, source: MessageSource) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batch(self) -> Sequence[FoundMessage]:
        global batches
        found = self._source.batch()
        batches += bool(found)
        die_if("read")
        return found

    def remove(self, found: Sequence[FoundMessage]) -> int:
        die_if("written")
        half = len(found) // 2
        removed = self._source.remove(found[:half])
        die_if("removing")
        removed += self._source.remove(found[half:])
        die_if("removed")
        return removed


def die_if(step: str) -> None:
    if step == STEP and batches == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt(self: EtaAdoption, source: MessageSource, on_batch: Callable[[], None]) -> None:
    original(self, Deadly(source), on_batch)


command.BATCH = 4
original = EtaAdoption.adopt
if STEP:
    EtaAdoption.adopt = adopt  # type: ignore[method-assign]
