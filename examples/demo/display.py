"""The live display: a bar for each kind of event, and the latest events."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from delaytasks import Status
from examples.demo.story import ORDERS, Shop


class Display:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: deque[Text] = deque(maxlen=8)
        self._began = time.monotonic()
        self._shop = Shop()
        self._live = Live(
            console=console, refresh_per_second=8, transient=True, get_renderable=self._picture
        )

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
            self._console.print(self._picture())

    def tell(self, text: str) -> None:
        line = Text.assemble((f"{time.monotonic() - self._began:5.1f} s  ", "dim"), text)
        self._told.append(line)
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)

    def draw(self, shop: Shop) -> None:
        self._shop = shop

    def _picture(self) -> Panel:
        story = Text("\n", no_wrap=True, overflow="ellipsis").join(self._told)
        return Panel(
            Group(self._bars(), Text(), self._workers(), Text(), story), title="a shop", width=80
        )

    def _bars(self) -> Table:
        shop, payments = self._shop, max(len(self._shop.payments), 1)
        closed = sum(task.status is Status.DONE for task in shop.orders_now)
        captured = sum(task.status is Status.DONE for task in shop.payments_now)
        table = Table.grid(padding=(0, 2))
        for name, count, total, color in (
            ("orders placed", len(shop.placed), ORDERS, "cyan"),
            ("paid, closing cancelled", len(shop.paid), ORDERS, "green"),
            ("closed unpaid", closed, ORDERS, "magenta"),
            ("payments captured", captured, payments, "yellow"),
        ):
            bar = ProgressBar(total, count, width=42, complete_style=color, finished_style=color)
            table.add_row(f"{name:24}", bar, f"{count:>4}")
        return table

    def _workers(self) -> Text:
        running = [
            task.worker or "" for task in self._shop.orders_now if task.status is Status.RUNNING
        ]
        parts: list[tuple[str, str]] = []
        for name in ("one", "two"):
            busy = sum(worker.startswith(f"{name}@") for worker in running)
            is_dead = self._shop.killed == name
            parts.append(
                (
                    f"worker {name}: {'killed' if is_dead else f'{busy} running'}    ",
                    "red" if is_dead else "",
                )
            )
        return Text.assemble(*parts)
