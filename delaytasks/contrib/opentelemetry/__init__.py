"""Spans and metrics of OpenTelemetry for delayed tasks.

Needs the extra `opentelemetry`. See docs/tracing.md.
"""

from __future__ import annotations

from delaytasks.core.errors import ConfigError

try:
    import opentelemetry.trace as _trace  # noqa: F401
except ImportError as missing:
    raise ConfigError(
        "delaytasks.contrib.opentelemetry needs the package opentelemetry-api: "
        "pip install 'delaytasks[opentelemetry]'"
    ) from missing

from delaytasks.contrib.opentelemetry.instrumentation import instrument, uninstrument
from delaytasks.contrib.opentelemetry.observing import observe, observe_worker

__all__ = ["instrument", "observe", "observe_worker", "uninstrument"]
