"""A broker for a machine without services: messages are files in the data folder.

It is kombu's filesystem transport, which has fanout for remote control and events, made private
and safe between processes. A message gets its name when it is complete, a reader takes it by
removing it, and each binding is an empty file with the binding as its name. The queue of a process
that was killed keeps what it gets, until `up` deletes the folder. The database has all tasks, so
the folder may be deleted at any time.
"""

import os
import time
import uuid
from pathlib import Path
from queue import Empty
from typing import Any
from urllib.parse import quote, unquote

from kombu.transport import filesystem
from kombu.utils.json import dumps, loads

from delaytasks.settings import MESSAGE_FOLDER, make_file, make_folder, write_file


class Channel(filesystem.Channel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder = Path(self.connection.client.virtual_host) / MESSAGE_FOLDER
        self.data_folder_in = self.data_folder_out = str(self._folder)
        if self._folder.parent.is_dir():  # a command that only reads makes no data folder
            self._keep_files()

    def _keep_files(self) -> None:
        """Make the folder and the bindings of this process again if they were deleted."""
        make_folder(self._folder)
        for path in [each for each in self.connection.bindings if not each.exists()]:
            make_folder(path.parent)
            make_file(path)

    def _put(self, queue: str, payload: Any, **_: Any) -> None:  # type: ignore[override]
        self._keep_files()
        # The name begins with the time, since files are read in the order of their names.
        name = f"{time.time_ns():020}_{uuid.uuid4()}.{queue}.msg"
        write_file(self._folder / f".{name}", dumps(payload))
        os.replace(self._folder / f".{name}", self._folder / name)

    def _get(self, queue: str, timeout: float | None = None) -> Any:
        self._keep_files()
        for name in sorted(os.listdir(self._folder)):
            if name.partition(".")[2] == f"{queue}.msg":
                try:
                    text = (self._folder / name).read_bytes()
                    os.unlink(self._folder / name)  # one reader succeeds
                except FileNotFoundError:
                    continue
                return loads(text)
        raise Empty

    def get_table(self, exchange: str) -> list[Any]:
        found = self._binding(exchange).glob("*")
        return [filesystem.exchange_queue_t(*map(unquote, path.name.split(","))) for path in found]

    def _queue_bind(self, exchange: str, *row: str | None) -> None:
        self.connection.bindings.add(self._binding(exchange, *row))
        self._keep_files()

    def _delete(self, queue: str, exchange: str, *row: Any, **_: Any) -> None:
        self._purge(queue)
        path = self._binding(exchange, *row)
        self.connection.bindings.discard(path)
        path.unlink(missing_ok=True)

    def _binding(self, exchange: str, *row: str | None) -> Path:
        """Return the file of a binding, or the folder of all bindings without one."""
        folder = self._folder / f"exchange-{quote(exchange, safe='')}"
        return folder / ",".join(quote(each or "", safe="") for each in row) if row else folder


class Transport(filesystem.Transport):
    Channel = Channel
    #: kombu's default of one second would be the lateness of a task.
    polling_interval = 0.25

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bindings: set[Path] = set()
