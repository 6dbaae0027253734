"""The sweep of near rows by one, two and four concurrent sweep partitions in separate processes."""

from __future__ import annotations

from benchmarks import brokers, table
from benchmarks.stage import CaseContext
from benchmarks.sweepers import sweep_concurrently
from benchmarks.waiting import BenchError
from delaytasks.model.moves import Status

PARTITIONS = (1, 2, 4)
#: Late enough that no row falls due during the sweep, and within the sweepers' horizon.
SOONEST_S, LATEST_S = 600.0, 900.0
DEADLINE_S = 240.0


def run(stage: CaseContext) -> None:
    """Arm with the eta timer without workers, and count the messages in the broker."""
    if not table.can_fill():
        stage.say(
            "sweep_partitions: skipped, since only PostgreSQL creates these rows within seconds"
        )
        return
    rows = stage.size(1_000_000, 50_000)
    table.clear()
    table.fill(rows, Status.NOT_COMPLETE, SOONEST_S, LATEST_S)
    table.settle_down()
    took: dict[int, float] = {}
    for count in PARTITIONS:
        table.forget_sweeps()
        took[count] = sweep_concurrently(count, stage.ours.folder, DEADLINE_S)
        armed = brokers.take_armed()
        twice, missed = len(armed) - len(set(armed)), rows - len(set(armed))
        stage.say(
            f"sweep_partitions: {rows:,} near rows, partitions = {count}: swept in "
            f"{took[count]:.2f} s, {rows / took[count]:,.0f}/s; "
            f"armed twice: {twice}, missed: {missed}"
        )
        if twice or missed:
            raise BenchError(
                f"sweep_partitions: with {count}, {twice:,} rows were armed twice "
                f"and {missed:,} were missed"
            )
        text = f"{rows:,} near rows, partitions = {count}"
        figure = stage.figure("sweep_partitions", text, "s", against="1:")
        figure.add(took[count], took[1] if count > 1 else None)
    table.clear()
    table.forget_sweeps()
