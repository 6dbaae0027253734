"""`python -m chaos.distant FOLDER DELAY…`: a producer with its own process and clock."""

from __future__ import annotations

import sys
from pathlib import Path

from chaos.history import CallRecord, Notebook
from chaos.project import now_us
from delaytasks.celery import delays
from delaytasks.model.clock import to_us

#: The tolerance of a clock that a process has measured.
ABOUT_US = 100_000


def main() -> None:
    folder, *seconds = sys.argv[1:]
    notes = Notebook(Path(folder))
    for delay in map(float, seconds):
        asked_us = now_us()
        task = delays.schedule_delay("chaos.note", {"folder": folder, "s": 0}, delay)
        due_us = to_us(task.expected_time)
        if abs(due_us - asked_us - delay * 1e6) > ABOUT_US + now_us() - asked_us:
            due_us = asked_us + int(delay * 1e6)  # the requested time, by the database's clock
        notes.note(CallRecord(task.id, "schedule", "ok", asked_us, now_us(), due_us))


if __name__ == "__main__":
    main()
