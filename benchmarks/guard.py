"""`python -m benchmarks.guard`: whether a burst is still drained many times as fast as by bare Celery, in the same run.

For CI, on whatever machine: running services are used, else embedded ones. It fails far below what is expected only, so
that it does not fail by noise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from tests.services import MissingServiceError, Services

CASE = "burst_bulk"
#: How many times as fast as bare Celery: 9 to 17, and 11, were measured by the same code on shared machines.
ON_POSTGRESQL, ON_SQLITE = 11.0, 9.0
#: The share of it that is alarming.
ALARMING = 0.7


def main() -> int:
    services = Services()
    try:
        with tempfile.TemporaryDirectory(prefix="delaytasks-guard-") as folder:
            # A database in which nothing else lies.
            broker = urlsplit(services.url("redis"))._replace(path="/5").geturl()
            try:
                database, expected = services.url("postgresql"), ON_POSTGRESQL
            except MissingServiceError:
                database, expected = f"sqlite:///{folder}/guard.sqlite3", ON_SQLITE
            return _compare(database, broker, Path(folder) / "figures.json", expected)
    except MissingServiceError as error:
        print(f"guard: not measured: {error}")
        return 1 if os.environ.get("CI") else 0
    finally:
        services.close()


def _compare(database: str, broker: str, figures: Path, expected: float) -> int:
    places = {"DELAYTASKS_BENCH_DATABASE_URL": database, "DELAYTASKS_BENCH_BROKER_URL": broker}
    command = [sys.executable, "-m", "benchmarks", CASE, "--quick", "--json", str(figures)]
    if subprocess.run(command, env={**os.environ, **places}, check=False).returncode:
        print("guard: the benchmark failed")
        return 1
    found = json.loads(figures.read_text())["figures"]
    (ratio,) = next(figure["ratios"] for figure in found if figure["unit"] == "drained/s")
    least = expected * ALARMING
    verdict = "" if ratio >= least else f": less than {least:.1f}, something has become slow"
    print(
        f"guard: a burst is drained {ratio:.1f} times as fast as by bare Celery, expected {expected:g}{verdict}"
    )
    return 0 if ratio >= least else 1


if __name__ == "__main__":
    sys.exit(main())
