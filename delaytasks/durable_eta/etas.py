"""The times in Celery's calls and messages."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware


def instant_of(eta: Any, app: Any) -> datetime:
    """Return the instant that Celery's worker reads from an eta.

    Parameters
    ----------
    eta
        A datetime, or its text in a message.
    app
        The Celery app, which has the time zone of an eta without one.
    """
    instant: datetime = maybe_make_aware(maybe_iso8601(eta), app.conf.timezone)
    return instant
