"""Reports failed tasks to Sentry, and continues traces from the scheduling call.

Needs the extra `sentry`. See docs/tracing.md.
"""

from __future__ import annotations

from delaytasks.core.errors import ConfigError

try:
    import sentry_sdk as _sentry_sdk  # noqa: F401
except ImportError as missing:
    raise ConfigError(
        "delaytasks.contrib.sentry needs the package sentry-sdk: pip install 'delaytasks[sentry]'"
    ) from missing

from delaytasks.contrib.sentry.integration import DelayTasksIntegration

__all__ = ["DelayTasksIntegration"]
