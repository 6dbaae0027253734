"""URLs for the probes of a server: whether it lives, and whether it is ready for requests."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping

from flask import Flask, Response

from delaytasks.client import DelayTasks
from delaytasks.core.clock import monotonic
from delaytasks.operations.health import HealthChecks, HealthQuestion
from delaytasks.wiring import wiring_of

#: Anyone may call these URLs, so the database is asked once in this time.
ASK_AGAIN_S = 1.0
#: The time that the database has to answer.
READY_ANSWER_S = 1.0


class Probes:
    """Answers without an API key, and therefore without the texts of errors."""

    def __init__(self, delays: DelayTasks) -> None:
        self._delays = delays
        self._lock = threading.Lock()
        self._asked_at = -math.inf
        self._results: Mapping[str, bool] = {}

    def add_to(self, app: Flask) -> None:
        app.add_url_rule("/health/live", "live", lambda: _answer({}))
        app.add_url_rule("/health/ready", "ready", lambda: _answer(self._ready()))

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
        wiring = wiring_of(self._delays)
        checks = HealthChecks(wiring.shards, wiring.settings, lambda: None)
        found = checks.ready(HealthQuestion("api", timeout_s=READY_ANSWER_S))
        return {check.name: check.is_ok for check in found}


def _answer(checks: Mapping[str, bool]) -> Response:
    is_healthy = all(checks.values())
    text = json.dumps({"is_healthy": is_healthy, "checks": checks})
    return Response(text, 200 if is_healthy else 503, content_type="application/json")
