"""Serves the metrics of one worker: over HTTP, or in a file."""

from __future__ import annotations

from functools import partial

from delaytasks.core.events import Events
from delaytasks.core.loop import Loop
from delaytasks.core.settings import Settings
from delaytasks.metrics.families import Source
from delaytasks.metrics.prometheus import MetricsServer, serve, write_file

#: How often the file is written, and when a write counts as stuck.
FILE_S, STUCK_S = 10.0, 60.0
#: How often the server is checked. A port may be in use: the worker before this one may still have
#: it.
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
        self._server: MetricsServer | None = None
        self._is_reported = False
        #: The loops, which the watchdog of the worker starts and checks.
        self.loops: list[Loop] = []
        if path:
            self.loops.append(Loop("metrics_writer", self._write, events, STUCK_S))
        if settings.metrics_port is not None:
            self.loops.append(Loop("metrics_server", self._serve, events, STUCK_S))

    def stop(self) -> None:
        for loop in self.loops:
            loop.stop()
        if self._server is not None:
            self._server.stop()
        if self._path:
            self._events.attempt("metrics", "last", partial(write_file, self._path, self._source))

    def _serve(self) -> float:
        """Serve at the port unless a server does so already; return when to check again."""
        host, port = self._settings.metrics_host, self._settings.metrics_port
        assert port is not None
        if self._server is not None:
            if self._server.is_alive:
                return PORT_S
            self._server.stop()
            self._server = None
            self._events.emit("loop.restarted", loop="metrics_server", reason="dead")
        try:
            self._server = serve(host, port, self._source)
        except OSError as error:  # a worker without metrics is better than no worker
            if not self._is_reported:
                self._events.emit("metrics.not_served", address=f"{host}:{port}", error=str(error))
            self._is_reported = True
        return PORT_S

    def _write(self) -> float:
        write_file(self._path, self._source)
        return FILE_S
