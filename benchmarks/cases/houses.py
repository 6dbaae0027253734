"""Near rows swept by one, two and four house numbers side by side, each in a process of its own."""

from __future__ import annotations

from benchmarks import brokers, table
from benchmarks.stage import Stage
from benchmarks.sweepers import sweep_side_by_side
from benchmarks.waiting import BenchError
from delaytasks.core.states import Status

HOUSES = (1, 2, 4)
#: Long enough that none falls due while it is swept, and all within the sweepers' horizon.
SOONEST_S, LATEST_S = 600.0, 900.0
DEADLINE_S = 240.0


def run(stage: Stage) -> None:
    """Armed by the eta timer, with no worker to take the messages in: what lies in the broker then is counted."""
    if not table.can_fill():
        stage.say("houses: left out, since only PostgreSQL makes so many rows in seconds")
        return
    rows = stage.size(1_000_000, 50_000)
    table.clear()
    table.fill(rows, Status.NOT_COMPLETE, SOONEST_S, LATEST_S)
    table.settle_down()
    took: dict[int, float] = {}
    for houses in HOUSES:
        table.forget_sweeps()
        took[houses] = sweep_side_by_side(houses, stage.ours.folder, DEADLINE_S)
        armed = brokers.take_armed()
        twice, missed = len(armed) - len(set(armed)), rows - len(set(armed))
        stage.say(
            f"houses: {rows:,} near rows, houses = {houses}: swept in {took[houses]:.2f} s, "
            f"{rows / took[houses]:,.0f}/s; armed twice: {twice}, missed: {missed}"
        )
        if twice or missed:
            raise BenchError(
                f"houses: with {houses}, {twice:,} rows were armed twice and {missed:,} were missed"
            )
        figure = stage.figure("houses", f"{rows:,} near rows, houses = {houses}", "s", against="1:")
        figure.add(took[houses], took[1] if houses > 1 else None)
    table.clear()
    table.forget_sweeps()
