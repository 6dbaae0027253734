"""`python -m benchmarks.viewers URL COUNT` reads a page as often as that many browsers do.

It prints `ready` when all of them have read it once, and for each line on stdin how many answers
came and how many were errors.
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


def view(url: str, count: int) -> None:
    request = urllib.request.Request(url, headers={USER: "viewer", "HX-Request": "true"})
    lock, counts = threading.Lock(), {True: 0, False: 0}

    def look(number: int) -> None:
        time.sleep(LIVE_S * number / count)
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    is_shown = b'id="live"' in answer.read()
            except OSError:
                is_shown = False
            with lock:
                counts[is_shown] += 1
            time.sleep(LIVE_S)

    for number in range(count):
        threading.Thread(target=look, args=(number,), daemon=True).start()
    while sum(counts.values()) < count:
        time.sleep(0.05)
    print("ready", flush=True)
    for _ in sys.stdin:
        print("answers", counts[True], counts[False], flush=True)


if __name__ == "__main__":
    view(sys.argv[1], int(sys.argv[2]))
