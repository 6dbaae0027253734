"""`python -m benchmarks.guard`: compare the drain rates of a burst with bare Celery's.

CI runs this command on any machine. It uses a running PostgreSQL, else SQLite. It fails only far
below the expected ratio, so that noise does not fail it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.services import MissingServiceError, Services

CASE = "burst_bulk"
#: The expected ratio to bare Celery. Measured ratios on shared machines were 9 to 17, and 11.
ON_POSTGRESQL, ON_SQLITE = 11.0, 9.0
#: Below this share of the expected ratio, the check fails.
ALARMING = 0.7


def main() -> int:
    services = Services()
    try:
        database, expected = services.url("postgresql"), ON_POSTGRESQL
    except MissingServiceError:
        database, expected = "sqlite://", ON_SQLITE
    try:
        with tempfile.TemporaryDirectory(prefix="delaytasks-guard-") as folder:
            return _compare(database, Path(folder) / "figures.json", expected)
    finally:
        services.close()


def _compare(database: str, figures: Path, expected: float) -> int:
    environment = {**os.environ, "DELAYTASKS_BENCH_DATABASE_URL": database}
    command = [sys.executable, "-m", "benchmarks", CASE, "--quick", "--json", str(figures)]
    if subprocess.run(command, env=environment, check=False).returncode:
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
