"""Seeds of the simulation: no findings in the unchanged code, and planted bugs are found quickly.

`./dev simulate` plays more seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import update

from chaos.simulation.clock import Times
from chaos.simulation.script import play_script
from chaos.simulation.stage import SimulationStage, stage
from delaytasks.core import text
from delaytasks.core.interfaces import Claimed, Settlement
from delaytasks.core.states import MOVES, Status
from delaytasks.core.task import Done
from delaytasks.execution.chunk import Chunk
from delaytasks.execution.executor import TaskExecutor
from delaytasks.maintenance.sweeper import Sweeper
from delaytasks.operations import durable_calls as celery_tasks
from delaytasks.recurrence import creation
from delaytasks.recurrence.creation import RecurringTable, plan
from delaytasks.storage import leases as lapses
from delaytasks.storage.claims import Claims
from delaytasks.storage.leases import Leases
from delaytasks.storage.task_rows import CeleryRows, Tasks
from delaytasks.timers import redis_timer as redis
from delaytasks.worker.redis_poller import RedisPoller
from delaytasks.worker.shared_memory import Renewals

SEEDS = 120
#: Each planted bug is found within this number of seeds, most of them within twenty.
MOST = 500


@pytest.fixture(scope="module")
def here() -> Iterator[SimulationStage]:
    with stage() as made:
        yield made


@pytest.mark.slow
def test_there_are_no_findings_in_the_unchanged_code(here: SimulationStage) -> None:
    claimed_ahead = 0
    for seed in range(SEEDS):
        verdict = here.play(seed, play_script)
        assert not verdict.findings, f"./dev simulate --seed {seed}\n{verdict}"
        claimed_ahead += verdict.claimed_ahead
    assert claimed_ahead, "no worker has claimed rows while it ran others"


def test_playing_a_seed_again_gives_the_same_history(here: SimulationStage) -> None:
    def history(seed: int) -> object:
        assert not here.play(seed, play_script).findings
        return here.last.history

    assert history(7) == history(7)
    assert history(7) != history(8)


# -- planted bugs ---------------------------------------------------------------------------------


def no_version_check_on_claim(patch: pytest.MonkeyPatch) -> None:
    def claim(self: Claims, entries: Any) -> Any:
        query, _ = self._claim_queries.named([(entry.id, entry.version) for entry in entries])
        ids = sorted({entry.id for entry in entries})
        return Claimed(self._db.autocommitted(lambda c: query.claim_locked(c, ids)))

    patch.setattr(Claims, "claim", claim)


def no_fence_on_finish(patch: pytest.MonkeyPatch) -> None:
    def settle(self: Claims, settlements: Any, on: Any = None) -> set[int]:
        t = self._t
        for one in settlements:
            values = {
                "status": int(MOVES[one.move].target),
                "version": t.c.version + 1,
                "lease_until": None,
            }
            due = {} if one.expected_time is None else {"expected_time": one.expected_time}
            self._db.autocommitted(
                lambda c: c.execute(update(t).where(t.c.id == one.task.id).values(**values, **due))  # noqa: B023
            )
        return {one.task.id for one in settlements}

    patch.setattr(Claims, "settle", settle)


def acknowledged_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tasks, "insert", lambda self, task, on=None: True)


def no_sweep(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sweeper, "sweep", lambda *_: True)


def the_workers_clock_decides(patch: pytest.MonkeyPatch) -> None:
    now = Times._strftime

    def skewed(self: Times, *words: str) -> str:
        true_us, self.now_us = self.now_us, self.now_us + self.skew_us()
        try:
            return now(self, *words)
        finally:
            self.now_us = true_us

    patch.setattr(Times, "_strftime", skewed)


def no_heartbeat(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "renew", lambda *_: 0)


def lapses_not_counted(patch: pytest.MonkeyPatch) -> None:
    def uncounted(t: Any, max_lost_leases: int, reason: str = "") -> Any:
        return update(t).values(
            status=int(Status.NOT_COMPLETE), version=t.c.version + 1, lease_until=None
        )

    patch.setattr(lapses, "recover_statement", uncounted)


def unsanitised_error_text(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(text, "storable", lambda raw, max_bytes: raw)


def given_back_rows_run_nevertheless(patch: pytest.MonkeyPatch) -> None:
    def give_back(chunk: Chunk) -> int:
        waiting = list(chunk._waiting)
        chunk.keep(Settlement(task, "give_back") for task in waiting)
        return len(waiting)

    patch.setattr(Chunk, "give_back", give_back)


def failed_instead_of_run(patch: pytest.MonkeyPatch) -> None:
    def fail(_: object, processor: object, tasks: Any, claimed: object) -> list[Settlement]:
        return [Settlement(task, "fail") for task in tasks]

    patch.setattr(TaskExecutor, "run", fail)


def entries_of_a_dead_poller_never_return(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(redis, "RETURN_S", 1e6)


def passed_on_entries_are_not_deleted(patch: pytest.MonkeyPatch) -> None:
    pass_on = RedisPoller._pass_on

    def keep(self: RedisPoller, taken: Any) -> None:
        pass_on(self, taken)
        self._passed_on = []

    patch.setattr(RedisPoller, "_pass_on", keep)


def notices_are_not_received(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RedisPoller, "_receive", lambda *_: None)


def leases_are_renewed_with_an_error(patch: pytest.MonkeyPatch) -> None:
    """The error of a missing attribute."""

    def tell(*_: object) -> None:
        raise AttributeError

    patch.setattr(Renewals, "record", tell)


def tasks_of_a_schedule_may_overlap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecurringTable, "live", lambda *_: set())


def the_first_task_of_a_visit_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A sweep makes the tasks of a schedule for some time, all but the first one."""

    def forgetful(*arguments: Any) -> Any:
        planned = plan(*arguments)
        return planned._replace(times=planned.times[1:] or planned.times)

    patch.setattr(creation, "plan", forgetful)


def schedules_are_not_advanced_with_their_tasks(patch: pytest.MonkeyPatch) -> None:
    """Nor does the key of a task keep another one from the same occurrence."""
    patch.setattr(RecurringTable, "advance", lambda *_: None)
    patch.setattr(RecurringTable, "take_keys", lambda _, on, tasks: {task.id for task in tasks})


def unconfirmed_messages_count_as_published(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(celery_tasks, "Snooze", lambda _: Done())


def a_revoke_changes_no_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CeleryRows, "live", lambda *_: [])


BUGS: list[tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = [
    (no_version_check_on_claim, {"illegal move"}),
    (no_fence_on_finish, {"double finish", "illegal move"}),
    (acknowledged_before_it_is_written, {"lost"}),
    (no_sweep, {"stuck"}),
    (the_workers_clock_decides, {"early"}),
    (no_heartbeat, {"duplicated"}),
    (lapses_not_counted, {"too often"}),
    (unsanitised_error_text, {"duplicated"}),
    (given_back_rows_run_nevertheless, {"duplicated"}),
    (failed_instead_of_run, {"lost"}),
    (entries_of_a_dead_poller_never_return, {"left in Redis"}),
    (passed_on_entries_are_not_deleted, {"left in Redis"}),
    (notices_are_not_received, {"late"}),
    (leases_are_renewed_with_an_error, {"failed"}),
    (tasks_of_a_schedule_may_overlap, {"overlapped"}),
    (the_first_task_of_a_visit_is_forgotten, {"left out"}),
    (schedules_are_not_advanced_with_their_tasks, {"repeated"}),
    (unconfirmed_messages_count_as_published, {"lost"}),
    (a_revoke_changes_no_row, {"revoked"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "kinds"), BUGS, ids=[bug.__name__ for bug, _ in BUGS])
def test_a_planted_bug_is_found(
    here: SimulationStage,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    kinds: set[str],
) -> None:
    bug(monkeypatch)
    found: set[str] = set()
    for seed in range(MOST):
        found |= set(here.play(seed, play_script).counts())
        if kinds & found:
            return
    pytest.fail(f"none of {kinds} in {found}")
