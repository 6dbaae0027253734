"""Seeds of the simulation: no findings in the unchanged code, and planted bugs are found quickly.

`./dev simulate` plays more seeds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from chaos.history import History
from chaos.simulation.script import play_script
from chaos.simulation.stage import Stage, stage
from tests.reliability.planted_bugs import BUGS
from tests.world import MonkeyPatch

SEEDS = 120
#: Each planted bug is found within this number of seeds, most of them within twenty.
MOST = 500


@pytest.fixture(scope="module")
def here() -> Iterator[Stage]:
    with stage() as made:
        yield made


@pytest.mark.slow
def test_there_are_no_findings_in_the_unchanged_code(here: Stage) -> None:
    ahead = 0
    for seed in range(SEEDS):
        verdict = here.play(seed, play_script)
        assert not verdict.findings, f"./dev simulate --seed {seed}\n{verdict}"
        ahead += claimed_ahead(here.last.history)
    assert ahead, "no process has claimed rows while it ran others"


def claimed_ahead(history: History) -> int:
    """Return how many rows were claimed while another row ran in the same process."""
    claims = [claim.change for task in history.tasks.values() for claim in task.claims]
    runs = [run for task in history.tasks.values() for run in task.runs.values()]
    return sum(
        run.worker == claim.worker and run.began_us < claim.at_us < (run.ended_us or 0)
        for claim in claims
        for run in runs
    )


def test_playing_a_seed_again_gives_the_same_history(here: Stage) -> None:
    def history(seed: int) -> object:
        assert not here.play(seed, play_script).findings
        return here.last.history

    assert history(7) == history(7)
    assert history(7) != history(8)


IN_TESTS = {name: bug for name, bug in BUGS.items() if "/" in bug.found_as[0]}
#: The fixtures of the databases that a test needs besides SQLite.
SERVERS = {"postgresql": "postgresql_url", "mariadb": "mysql_url"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUGS.keys() - IN_TESTS))
def test_a_planted_bug_is_found(here: Stage, monkeypatch: MonkeyPatch, name: str) -> None:
    kinds, found = BUGS[name].found_as, set[str]()
    BUGS[name].plant(monkeypatch)
    for seed in range(MOST):
        found |= here.play(seed, play_script).kinds().keys()
        if found & {*kinds}:
            return
    pytest.fail(f"none of {kinds} in {found}")


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_TESTS)
def test_a_planted_bug_fails_a_test(request: pytest.FixtureRequest, name: str) -> None:
    bug = IN_TESTS[name]
    if bug.on in SERVERS:
        request.getfixturevalue(SERVERS[bug.on])
    place, _, words = bug.found_as[0].partition(" ")
    folder, _, file = place.rpartition("/")
    options = ["-p", "tests.reliability.planted_bugs", "-p", "no:cacheprovider", "-n", "0"]
    options += [f"tests/{folder}/test_{file}.py", "-k", words]
    # Coverage would skip a test of time limits; what a planted bug reaches says nothing besides.
    unmeasured = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "--all", *options],
        env=unmeasured | {"PLANTED_BUG": name, "DELAYTASKS_TEST_DATABASES": bug.on},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "1 failed" in run.stdout
