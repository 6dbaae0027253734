"""Serves the metrics of one worker: over HTTP, or in a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from delaytasks.core.events import Events
from delaytasks.core.loop import Loop
from delaytasks.core.settings import Settings
from delaytasks.metrics.families import Source
from delaytasks.metrics.prometheus import serve, write_file

#: How often the file is written, and when a write counts as stuck.
FILE_S, STUCK_S = 10.0, 60.0
#: How often a port that is in use is tried again: the worker before this one may still have it.
PORT_S = 10.0


class MetricsEndpoint:
    """Serves metrics as the settings `metrics_port` and `metrics_file` ask for.

    Parameters
    ----------
    settings
        The settings of the worker.
    events
        Gets `metrics.not_served` once if the port is in use, which is then tried again.
    path
        The file, in which the worker's name has replaced its placeholders; empty for none.
    source
        The metrics.
    """

    def __init__(self, settings: Settings, events: Events, path: str, source: Source) -> None:
        self._settings = settings
        self._events = events
        self._path = path
        self._source = source
        self._stop_serving: Callable[[], None] | None = None
        self._is_reported = False
        self._loop = Loop("metrics", self._write, events, STUCK_S) if path else None
        self._port_loop = Loop("metrics port", self._serve, events)

    def start(self) -> None:
        if self._settings.metrics_port is not None and self._serve() is not None:
            self._port_loop.start()
        if self._loop is not None:
            self._loop.start()

    def stop(self) -> None:
        self._port_loop.stop()
        stop, self._stop_serving = self._stop_serving, None
        if stop is not None:
            stop()
        if self._loop is not None:
            self._loop.stop()
            self._events.attempt("metrics", "last", partial(write_file, self._path, self._source))

    def _serve(self) -> float | None:
        """Serve at the port; return when to try again, or None if it is served."""
        host, port = self._settings.metrics_host, self._settings.metrics_port
        if port is None or self._stop_serving is not None:
            return None
        try:
            self._stop_serving = serve(host, port, self._source)
        except OSError as error:  # a worker without metrics is better than no worker
            if not self._is_reported:
                self._events.emit("metrics.not_served", address=f"{host}:{port}", error=str(error))
            self._is_reported = True
            return PORT_S
        return None

    def _write(self) -> float:
        write_file(self._path, self._source)
        return FILE_S
