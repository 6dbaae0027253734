"""Limits how often passwords can be tried."""

from __future__ import annotations

import threading
from collections import OrderedDict

from delaytasks.core.clock import monotonic

#: Failed logins of one name from one address, and of all names from one address, that are allowed
#: in a period, and the period.
MOST_FAILURES, MOST_OF_ADDRESS, PERIOD_S = 5, 50, 300.0
#: Names and addresses that are remembered. The oldest are forgotten first.
MOST_REMEMBERED = 10_000


class LoginLimit:
    """Counts failed logins in the memory of this process.

    A name alone has no limit: anyone could lock out an operator by name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The times of failures by name and address. The name None counts all names.
        self._failures: OrderedDict[tuple[str | None, str], list[float]] = OrderedDict()

    def wait_s(self, name: str, address: str) -> float:
        """Return the seconds until this name may try again from this address, 0 if it may now."""
        now = monotonic()
        with self._lock:
            waits = [0.0]
            for subject, most in _subjects(name, address).items():
                recent = [at for at in self._failures.get(subject, []) if now - at < PERIOD_S]
                if len(recent) >= most:
                    waits.append(recent[-most] + PERIOD_S - now)
            return max(waits)

    def failed(self, name: str, address: str) -> None:
        with self._lock:
            for subject, most in _subjects(name, address).items():
                times = self._failures.setdefault(subject, [])
                times.append(monotonic())
                del times[:-most]
                self._failures.move_to_end(subject)
            while len(self._failures) > MOST_REMEMBERED:
                self._failures.popitem(last=False)

    def succeeded(self, name: str, address: str) -> None:
        # The count of the address stays: a user could reset it between guesses of other passwords.
        with self._lock:
            self._failures.pop((name, address), None)


def _subjects(name: str, address: str) -> dict[tuple[str | None, str], int]:
    """Return what is counted, and how many failures of each are allowed."""
    return {(name, address): MOST_FAILURES, (None, address): MOST_OF_ADDRESS}
