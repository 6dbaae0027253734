"""How far a command has come, for people at a terminal."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

    from delaytasks.cli.context import Cli


def progress_bar(cli: Cli, done: str) -> Progress:
    """A task of it has a field `moved`: how many tasks were `done`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    return Progress(
        BarColumn(),
        TaskProgressColumn(),
        TextColumn(f"{{task.fields[moved]:,}} tasks {done}"),
        TimeElapsedColumn(),
        console=console,
        disable=cli.is_json or not console.is_terminal,
        transient=True,
    )


@contextmanager
def stopping_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C lets the step end that is under way: what is yielded raises `KeyboardInterrupt` then. A second Ctrl-C
    waits for nothing."""
    is_stopped = False

    def stop(_number: int, _frame: Any) -> None:
        nonlocal is_stopped
        if is_stopped:
            raise KeyboardInterrupt
        is_stopped = True

    def check() -> None:
        if is_stopped:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
