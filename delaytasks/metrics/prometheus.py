"""Serves metrics to Prometheus, over HTTP or in a file. Needs the extra `prometheus`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

from delaytasks.events import Events
from delaytasks.loops import Loop
from delaytasks.metrics import Family, HistogramValue, Source
from delaytasks.model.errors import ConfigError
from delaytasks.settings import Address

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks

try:
    from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
    from prometheus_client.exposition import write_to_textfile
    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as missing:
    raise ConfigError(
        "metrics for Prometheus need prometheus_client: pip install 'delaytasks[prometheus]'"
    ) from missing

WSGIApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class FamilyCollector(Collector):
    """Passes the values of some sources on to a registry of `prometheus_client`."""

    def __init__(self, *sources: Source) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        for source in self._sources:
            yield from map(metric_of, source.families())

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector reads no database."""
        return ()


def metric_of(family: Family) -> Metric:
    """Return a metric as the client library of Prometheus represents it."""
    if family.kind == "histogram":
        return _histogram(family)
    kind = GaugeMetricFamily if family.kind == "gauge" else CounterMetricFamily
    metric = kind(family.name, family.about, labels=family.labels)
    for labels, value in family.samples:
        assert not isinstance(value, HistogramValue)
        metric.add_metric(labels, value)
    return metric


def _histogram(family: Family) -> HistogramMetricFamily:
    metric = HistogramMetricFamily(family.name, family.about, labels=family.labels)
    for labels, value in family.samples:
        assert isinstance(value, HistogramValue)
        reached, buckets = 0, list[tuple[str, float]]()
        for bound, count in zip((*value.bounds, float("inf")), value.counts, strict=True):
            reached += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(reached)))
        metric.add_metric(labels, buckets, value.sum)
    return metric


def registry_of(*sources: Source) -> CollectorRegistry:
    """Return a registry with the metrics of these sources only."""
    registry = CollectorRegistry()
    registry.register(FamilyCollector(*sources))
    return registry


def exporter_app(delays: DelayTasks) -> WSGIApp:
    """Return a WSGI application that answers with the metrics of the database.

    Parameters
    ----------
    delays
        A `DelayTasks`.

    Returns
    -------
    callable
        The application. It answers to any path, so mount it under `/metrics`.

    Raises
    ------
    ConfigError
        If `prometheus_client` is not installed.

    Examples
    --------
    >>> application = DispatcherMiddleware(site, {"/metrics": exporter_app(delays)})
    """
    from delaytasks.metrics.snapshot import DatabaseMetrics

    app: WSGIApp = make_wsgi_app(registry_of(DatabaseMetrics(delays._runtime)))
    return app


class MetricsServer:
    """A server of metrics in a thread of its own."""

    def __init__(self, server: Any, thread: Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        if self.is_alive:  # otherwise, `shutdown` would wait forever
            self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(host: str, port: int, *sources: Source) -> MetricsServer:
    """Serve the metrics over HTTP in a thread.

    Raises
    ------
    OSError
        If the port is in use.
    """
    return MetricsServer(*start_http_server(port, host, registry_of(*sources)))


def write_file(path: str, *sources: Source) -> None:
    """Write the metrics to a file, for the text file collector of Prometheus' node exporter.

    The file is replaced as a whole, so that no reader sees half of it.
    """
    write_to_textfile(os.fspath(path), registry_of(*sources))


#: How often the file is written, and when a write counts as stuck.
FILE_S, STUCK_S = 10.0, 60.0
#: How often the server is checked. A port may be in use: the worker before this one may still have
#: it.
PORT_S = 10.0


class MetricsEndpoint:
    """Serves metrics as the setting `metrics` asks for.

    Parameters
    ----------
    place
        The address, or the path of the file, in which the worker's name has replaced its
        placeholders.
    events
        Gets `metrics.not_served` once if the port is in use, which is then tried again.
    source
        The metrics.
    """

    def __init__(self, place: Address | str, events: Events, source: Source) -> None:
        self._place = place
        self._events = events
        self._source = source
        self._server: MetricsServer | None = None
        self._is_reported = False
        if isinstance(place, Address):
            loop = Loop("metrics_server", partial(self._serve, place), events, STUCK_S)
        else:
            loop = Loop("metrics_writer", partial(self._write, place), events, STUCK_S)
        #: The loop, which the watchdog of the worker starts and checks.
        self.loop = loop

    def stop(self) -> None:
        self.loop.stop()
        if self._server is not None:
            self._server.stop()
        if not isinstance(self._place, Address):
            self._events.attempt("metrics", "last", partial(self._write, self._place))

    def _serve(self, address: Address) -> float:
        """Serve at the port unless a server does so already; return when to check again."""
        if self._server is not None:
            if self._server.is_alive:
                return PORT_S
            self._server.stop()
            self._server = None
            self._events.emit("loop.restarted", loop="metrics_server", reason="dead")
        try:
            self._server = serve(*address, self._source)
        except OSError as error:  # a worker without metrics is better than no worker
            if not self._is_reported:
                self._events.emit("metrics.not_served", address=str(address), error=str(error))
            self._is_reported = True
        return PORT_S

    def _write(self, path: str) -> float:
        write_file(path, self._source)
        return FILE_S
