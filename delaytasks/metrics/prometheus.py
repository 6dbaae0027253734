"""Serves metrics to Prometheus, over HTTP or in a file. Needs the extra `prometheus`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from threading import Thread
from typing import Any

from delaytasks.events import Events
from delaytasks.loops import Loop
from delaytasks.model.errors import ConfigError
from delaytasks.settings import Address

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

#: What the other modules of metrics take from the client.
__all__ = ["Collector", "Metric", "make_wsgi_app"]

#: The values of the labels, and the value.
Samples = Iterable[tuple[tuple[object, ...], float]]


def gauge(name: str, about: str, value: float | None) -> Metric:
    """Return a metric without labels, and without a value if that is None."""
    return gauges(name, about, [] if value is None else [((), value)])


def gauges(name: str, about: str, samples: Samples, *labels: str) -> Metric:
    return _filled(GaugeMetricFamily(name, about, labels=labels), samples)


def counters(name: str, about: str, samples: Samples, *labels: str) -> Metric:
    return _filled(CounterMetricFamily(name, about, labels=labels), samples)


def _filled(metric: GaugeMetricFamily | CounterMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        metric.add_metric([str(label) for label in labels], float(value))
    return metric


def histograms(
    name: str,
    about: str,
    bounds: Sequence[float],
    samples: Iterable[tuple[tuple[str, ...], Sequence[int], float]],
    *labels: str,
) -> Metric:
    """Return counted times: for each sample its labels, the counts, and the sum of the times.

    There is one count more than `bounds`, for all longer times.
    """
    metric = HistogramMetricFamily(name, about, labels=labels)
    names = [*map(repr, bounds), "+Inf"]
    for values, counts, total in samples:
        reached = map(float, accumulate(counts))
        metric.add_metric(values, list(zip(names, reached, strict=True)), total)
    return metric


def registry_of(source: Collector) -> CollectorRegistry:
    """Return a registry with the metrics of this source only."""
    registry = CollectorRegistry()
    registry.register(source)
    return registry


class MetricsServer:
    """A server of metrics in a thread of its own."""

    def __init__(self, server: Any, thread: Thread) -> None:
        self._server = server
        self._thread = thread

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(host: str, port: int, source: Collector) -> MetricsServer:
    """Serve the metrics over HTTP in a thread.

    Raises
    ------
    OSError
        If the port is in use.
    """
    return MetricsServer(*start_http_server(port, host, registry_of(source)))


def write_file(path: str, source: Collector) -> None:
    """Write the metrics to a file, for the text file collector of Prometheus' node exporter.

    The file is replaced as a whole, so that no reader sees half of it.
    """
    write_to_textfile(os.fspath(path), registry_of(source))


#: How often the file is written.
FILE_S = 10.0
#: How often a port is tried that is in use: the worker before this one may still have it.
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

    def __init__(self, place: Address | str, events: Events, source: Collector) -> None:
        self._place = place
        self._events = events
        self._source = source
        self._server: MetricsServer | None = None
        self._is_reported = False
        if isinstance(place, Address):
            loop = Loop("metrics_server", partial(self._serve, place), events)
        else:
            loop = Loop("metrics_writer", partial(self._write, place), events)
        #: The loop, which the worker starts.
        self.loop = loop

    def stop(self) -> None:
        self.loop.stop()
        if self._server is not None:
            self._server.stop()
        if not isinstance(self._place, Address):
            self._events.attempt("metrics", "last", partial(self._write, self._place))

    def _serve(self, address: Address) -> float | None:
        """Serve at the port; return when to try again, or None."""
        try:
            self._server = serve(*address, self._source)
        except OSError as error:  # a worker without metrics is better than no worker
            if not self._is_reported:
                self._events.emit("metrics.not_served", address=str(address), error=str(error))
            self._is_reported = True
            return PORT_S
        return None

    def _write(self, path: str) -> float:
        write_file(path, self._source)
        return FILE_S
