"""The class that the command `opentelemetry-instrument` finds by its entry point."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from celery.signals import worker_ready
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import TracerProvider

from delaytasks.contrib.opentelemetry.instrumentation import instrument, uninstrument
from delaytasks.contrib.opentelemetry.observing import observe_worker


class DelayTasksInstrumentor(BaseInstrumentor):
    """Makes spans and metrics of delayed tasks, and the metrics of a worker."""

    def instrumentation_dependencies(self) -> Collection[str]:
        return ()

    def _instrument(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
        **_: Any,
    ) -> None:
        self._meter_provider = meter_provider
        instrument(tracer_provider, meter_provider)
        worker_ready.connect(self._observe)

    def _uninstrument(self, **_: Any) -> None:
        worker_ready.disconnect(self._observe)
        uninstrument()

    def _observe(self, sender: Any, **_: Any) -> None:
        if getattr(sender.controller, "delays_runtime", None) is not None:
            observe_worker(sender, self._meter_provider)
