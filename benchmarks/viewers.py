"""Viewers of the console: `python -m benchmarks.viewers URL COUNT`.

Each of them reads the page as often as a browser does that shows it. It prints `ready` when all of
them have read it once, and for each line on stdin how many answers came and how many were errors.
"""

from __future__ import annotations

import sys
import threading
import time
import urllib.request

#: Seconds between two reads, as in console.js.
LIVE_S = 5.0
#: The header in which the console gets the name of the viewer.
USER = "X-Bench-User"


class Viewers:
    def __init__(self, url: str, count: int) -> None:
        self._request = urllib.request.Request(url, headers={USER: "viewer", "HX-Request": "true"})
        self._lock = threading.Lock()
        self.answers = self.errors = 0
        self._count = count

    def start(self) -> None:
        for number in range(self._count):
            threading.Thread(target=self._view, args=(number,), daemon=True).start()
        while self.answers + self.errors < self._count:
            time.sleep(0.05)

    def _view(self, number: int) -> None:
        time.sleep(LIVE_S * number / self._count)
        while True:
            try:
                with urllib.request.urlopen(self._request, timeout=30) as answer:
                    is_shown = b'id="live"' in answer.read()
            except OSError:
                is_shown = False
            with self._lock:
                self.answers += is_shown
                self.errors += not is_shown
            time.sleep(LIVE_S)


def main() -> None:
    viewers = Viewers(sys.argv[1], int(sys.argv[2]))
    viewers.start()
    print("ready", flush=True)
    for _ in sys.stdin:
        print("answers", viewers.answers, viewers.errors, flush=True)


if __name__ == "__main__":
    main()
