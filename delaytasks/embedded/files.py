"""kombu's filesystem transport, made safe between processes.

With kombu's own transport, a reader may find a message that is still being written, which ends the
worker. Here a file gets its name when it is complete, and a reader takes a file by renaming it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from time import monotonic_ns
from typing import Any

from kombu.exceptions import ChannelError
from kombu.transport import filesystem
from kombu.utils.json import dumps, loads

from delaytasks.core.private_files import make_file, make_folder, write_file


class Channel(filesystem.Channel):
    """A channel whose folders and files only their owner can read: messages contain arguments of
    tasks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for folder in (Path(self.data_folder_in), self.control_folder):
            make_folder(folder)

    def _put(self, queue: str, payload: Any, **_: Any) -> None:  # type: ignore[override]  # kombu names it twice
        # The name begins with the time, since files are read in the order of their names.
        name = f"{monotonic_ns():020}_{uuid.uuid4()}.{queue}.msg"
        _write(Path(self.data_folder_out) / name, payload)

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        folder, ending = Path(self.data_folder_in), f"{queue}.msg"
        for name in sorted(os.listdir(folder)):
            if name.partition(".")[2] != ending:
                continue
            taken = folder / f"{name}.taken"
            try:
                os.rename(folder / name, taken)  # one reader succeeds
            except FileNotFoundError:
                continue
            text = taken.read_bytes()
            taken.unlink()
            return loads(text)
        raise Empty

    # -- the queues of exchanges ------------------------------------------------------------------

    def _exchange_file(self, exchange: str) -> Path:
        # kombu has such a method since 5.7.
        file: Path = self.control_folder / f"{exchange}.exchange"
        if file.parent != self.control_folder:
            raise ChannelError(f"the exchange name {exchange!r:.200} is not the name of a file")
        return file

    def get_table(self, exchange: str) -> list[Any]:
        try:
            rows = loads(self._exchange_file(exchange).read_bytes())
        except FileNotFoundError:
            return []
        return [filesystem.exchange_queue_t(*row) for row in rows]

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str, queue: str) -> None:
        with self._changing(exchange) as rows:
            row = [routing_key or "", pattern or "", queue or ""]
            if row not in rows:
                rows.insert(0, row)

    def _delete(
        self, queue: str, exchange: str, routing_key: str, pattern: str, *args: Any, **kwargs: Any
    ) -> None:
        self._purge(queue)
        with self._changing(exchange) as rows:
            rows[:] = [
                row for row in rows if row != [routing_key or "", pattern or "", queue or ""]
            ]

    @contextmanager
    def _changing(self, exchange: str) -> Iterator[list[list[str]]]:
        """Yield the rows of an exchange, and write them if they changed; one process at a time."""
        file = self._exchange_file(exchange)
        make_file(self.control_folder / "lock")
        with open(self.control_folder / "lock", "w") as lock:
            filesystem.lock(lock, filesystem.LOCK_EX)  # closing the file unlocks it
            rows = [list(row) for row in self.get_table(exchange)]
            before = [list(row) for row in rows]
            yield rows
            if rows != before:
                _write(file, rows)


class Transport(filesystem.Transport):
    Channel = Channel


def _write(path: Path, content: Any) -> None:
    new = path.with_name(f".{uuid.uuid4()}.new")
    write_file(new, dumps(content))
    os.replace(new, path)
