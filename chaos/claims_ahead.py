"""Count the rows that a process claimed while it ran another row."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from chaos.history import History
from delaytasks.model.moves import Status


def claimed_ahead(history: History) -> int:
    """Return how many rows were claimed while another row ran in the same process.

    In pools of threads, and for processors that run rows concurrently, other claims count too.
    """
    claims = {
        (change.id, change.version): change
        for change in history.changes
        if change.status is Status.RUNNING and change.version != change.version_was
    }
    runs: dict[str | None, list[tuple[int, int]]] = defaultdict(list)
    for run in history.run_records:
        claim = claims.get((run.id, run.version))
        if claim is not None:
            runs[claim.worker].append((run.began_us, run.ended_us or run.began_us))
    for some in runs.values():
        some.sort()

    def is_ahead(worker: str | None, at_us: int) -> bool:
        before = bisect_right(runs[worker], (at_us, 0)) - 1
        return before >= 0 and runs[worker][before][1] > at_us

    return sum(is_ahead(claim.worker, claim.at_us) for claim in claims.values())
