"""Forecasts in words, for the command line and the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from delaytasks.core.durations import show_duration
from delaytasks.core.text import count
from delaytasks.forecast.result import Forecast, ForecastPool, ForecastStep, rank_of

#: Tasks are counted by second, so that a smaller lateness means nothing.
ON_TIME_S = 1.0


def worst_sentence(found: Forecast, show: Callable[[datetime], str]) -> str | None:
    """Return how late the latest step starts, with the present workers and with twice as many.

    Return None if all tasks start on time, or some never start.

    Parameters
    ----------
    found
        The forecast.
    show
        Shows the start of the step, as the reader sees times.
    """
    worst, workers = found.worst, _workers(found)
    if worst is None or not worst.late_s or not workers or worst.late_s_doubled is None:
        return None
    return (
        f"{_late_sentence(found, worst, worst.late_s, show)}, and {2 * workers:,} workers "
        f"{lateness_text(worst.late_s_doubled)}"
    )


def peak_sentences(found: Forecast, show: Callable[[datetime], str]) -> str | None:
    """Return how late the peak starts, and how many workers are enough.

    Return None if no task that workers run starts later than the target of the forecast.
    """
    peak, needed = found.peak, found.needed_workers
    if peak is None or peak.late_s_served <= found.target_s:
        return None
    late = _late_sentence(found, peak, peak.late_s_served, show)
    if needed is None:
        return f"From {late}. The limit of a tag keeps tasks late with any number of workers."
    enough = f"at most {show_duration(found.target_s)} late"
    return f"From {late}. {count(needed, 'worker')} would start each task {enough}."


def _workers(found: Forecast) -> int:
    return sum(pool.workers for pool in found.pools)


def _late_sentence(
    found: Forecast, step: ForecastStep, late_s: float, show: Callable[[datetime], str]
) -> str:
    return (
        f"{show(step.start)} on: {count(step.due, 'task')}{_largest_tag(found, step)}, which "
        f"{count(_workers(found), 'worker')} would start {lateness_text(late_s)}"
    )


def _largest_tag(found: Forecast, step: ForecastStep) -> str:
    """Return " of mail.send" or " (3,000 of mail.send)": the tag with the most tasks of a step.

    Tags whose tasks do not start are left out, since they do not make others late.
    """
    stuck = {tag.tag for tag in found.tags if tag.late_s is None}
    tag, due = next((each for each in step.due_by_tag.items() if each[0] not in stuck), ("", 0))
    if not tag:
        return ""
    return f" of {tag}" if due >= step.due else f" ({due:,} of {tag})"


def pool_sentence(pool: ForecastPool, target_s: float) -> str:
    """Return how late the tasks of a pool are, and how many workers it needs."""
    here = "no worker serves them"
    if pool.workers:
        processes = count(pool.processes, "process", "processes")
        workers = f"{count(pool.workers, 'worker')} with {processes}"
        here = f"{workers} would start each task {lateness_text(pool.late_s or 0.0)}"
    needed = "more workers would not help, because a limit of a tag causes the lateness"
    if pool.needed_workers is not None:
        target = f"at most {show_duration(target_s)} late"
        needed = f"{count(pool.needed_workers, 'worker')} would start each task {target}"
    return f"queues {', '.join(pool.queues)}: {here}; {needed}"


def lateness_text(late_s: float) -> str:
    return "on time" if late_s < ON_TIME_S else f"up to {show_duration(late_s)} late"


def most_important(steps: Sequence[ForecastStep], most: int) -> Sequence[ForecastStep]:
    """Return the latest and largest steps, in the order of time."""
    return sorted(sorted(steps, key=rank_of)[-most:], key=lambda step: step.start)
