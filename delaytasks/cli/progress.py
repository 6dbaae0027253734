"""The progress of a command on a terminal, and Ctrl-C between two steps."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

    from delaytasks.cli.context import Cli


def progress_bar(cli: Cli, text: str) -> Progress:
    """Return a progress bar on stderr, followed by `text`, a template of the task's fields."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(text),
        TimeElapsedColumn(),
        console=console,
        disable=cli.is_json or not console.is_terminal,
        transient=True,
    )


def moved_bar(cli: Cli, done: str) -> Progress:
    """Return a progress bar whose task has a field `moved`, the number of tasks `done`."""
    return progress_bar(cli, f"{{task.fields[moved]:,}} tasks {done}")


@contextmanager
def stopping_between_steps() -> Iterator[Callable[[], None]]:
    """Let the current step end after Ctrl-C; a second Ctrl-C ends it immediately.

    The command calls the yielded function after each step. It raises `KeyboardInterrupt` after
    Ctrl-C.
    """
    is_stopped = False

    def check() -> None:
        if is_stopped:
            raise KeyboardInterrupt

    def stop(_number: int, _frame: Any) -> None:
        nonlocal is_stopped
        check()
        is_stopped = True

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
