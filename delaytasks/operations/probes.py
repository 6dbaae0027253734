"""URLs for the probes of a server: whether it lives, and whether it is ready for requests.

The HTTP API and the console have them.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from delaytasks.core.clock import monotonic
from delaytasks.operations.health import HealthChecks, HealthQuestion

#: What a view of Flask may return: the text, the status and the headers.
ProbeAnswer = tuple[str, int, dict[str, str]]

#: The names of the URLs in an app.
ENDPOINTS = ("health_live", "health_ready")
#: Anyone may call these URLs, so the database is asked once in this time.
ASK_AGAIN_S = 1.0
#: The time that the database has to answer.
READY_ANSWER_S = 1.0


class Probes:
    """Answers without an API key or a login, and therefore without the texts of errors."""

    def __init__(self, checks: Callable[[], HealthChecks]) -> None:
        """`checks` is called before each question to the databases, and not at the start."""
        self._checks = checks
        self._lock = threading.Lock()
        self._asked_at = -math.inf
        self._results: Mapping[str, bool] = {}

    def add_to(self, app: Any) -> None:
        """Add the URLs to a Flask application."""
        app.add_url_rule("/health/live", "health_live", lambda: _answer({}))
        app.add_url_rule("/health/ready", "health_ready", lambda: _answer(self._ready()))

    def _ready(self) -> Mapping[str, bool]:
        """Return whether each check succeeds. Callers need the databases, and no broker.

        While one thread asks, others answer from the last result, so that probes during an outage
        do not block the threads that serve requests.
        """
        if self._lock.acquire(blocking=not self._results):
            try:
                if monotonic() - self._asked_at > ASK_AGAIN_S:
                    self._results = self._ask()
                    self._asked_at = monotonic()
            finally:
                self._lock.release()
        return self._results

    def _ask(self) -> Mapping[str, bool]:
        found = self._checks().ready(HealthQuestion("api", timeout_s=READY_ANSWER_S))
        return {check.name: check.is_ok for check in found}


def _answer(checks: Mapping[str, bool]) -> ProbeAnswer:
    is_healthy = all(checks.values())
    text = json.dumps({"is_healthy": is_healthy, "checks": checks})
    return text, 200 if is_healthy else 503, {"Content-Type": "application/json"}
