"""For how long this process has reached a database without an interruption."""

from __future__ import annotations

from delaytasks.core.clock import monotonic


class Contact:
    """Measures one database's contact. A process that did not reach the database cannot tell a worker that died from
    one that could not report, and a process that stood still cannot tell either."""

    def __init__(self, gap_s: float) -> None:
        """After `gap_s` without an answer the contact begins anew."""
        self._gap_s = gap_s
        self._since = self._answered_at = float("-inf")

    def answered(self) -> None:
        now = monotonic()
        if now - self._answered_at > self._gap_s:
            self._since = now
        self._answered_at = now

    def failed(self) -> None:
        self._answered_at = float("-inf")

    @property
    def seconds(self) -> float:
        now = monotonic()
        return 0.0 if now - self._answered_at > self._gap_s else now - self._since
