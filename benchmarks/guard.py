"""`python -m benchmarks.guard`: compare the drain rates of a burst with bare Celery's.

CI runs this command on any machine. It uses running services, else embedded ones. It fails only far
below the expected ratio, so that noise does not fail it.
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
#: The expected ratio to bare Celery. Measured ratios on shared machines were 9 to 17, and 11.
ON_POSTGRESQL, ON_SQLITE = 11.0, 9.0
#: Below this share of the expected ratio, the check fails.
ALARMING = 0.7


def main() -> int:
    services = Services()
    try:
        with tempfile.TemporaryDirectory(prefix="delaytasks-guard-") as folder:
            # A database without other data.
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
    verdict = "" if ratio >= least else f": less than {least:.1f}: a regression"
    print(
        f"guard: a burst is drained {ratio:.1f} times as fast as by bare Celery, expected "
        f"{expected:g}{verdict}"
    )
    return 0 if ratio >= least else 1


if __name__ == "__main__":
    sys.exit(main())
