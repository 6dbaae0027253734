"""Combines what all databases have with the workers to one forecast."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from delaytasks.core.policies import Policy
from delaytasks.core.registered_worker import RegisteredWorker
from delaytasks.forecast.due_counts import DueCount, DueCounts
from delaytasks.forecast.pools import pools_of
from delaytasks.forecast.question import Question
from delaytasks.forecast.rates import Rates, TagRate
from delaytasks.forecast.result import Forecast, ForecastPool
from delaytasks.forecast.steps import TimeSteps, rounded

#: Names in one note.
MAX_NAMES = 5


class ShardForecastInput(NamedTuple):
    """What a forecast needs from one database."""

    due: DueCounts
    #: The workers that are alive, by name.
    workers: Mapping[str, RegisteredWorker]
    policies: Sequence[Policy]


def combined(
    question: Question,
    now: datetime,
    until: datetime,
    found: Sequence[ShardForecastInput],
    missing: tuple[int, ...],
    rates: Rates,
    default_processes: int,
) -> Forecast:
    """Return the forecast.

    Parameters
    ----------
    question
        The arguments of the call.
    now, until
        The time of the forecast.
    found, missing
        What the databases have, and the numbers of those that cannot be reached.
    rates
        Computes the rates of tags.
    default_processes
        The number of processes of a worker if none is alive.
    """
    counts = [each for one in found for each in one.due.counts]
    policies = [policy for one in found for policy in one.policies]
    paused, active = _divided(counts, policies)
    # Each worker is known in each database.
    workers = {name: worker for one in found for name, worker in one.workers.items()}
    tag_rates = rates.of({each.tag for each in counts})
    steps = TimeSteps(now.timestamp(), until.timestamp(), question.step_s, tag_rates, question.tag)
    steps.add_paused(paused)
    pools = tuple(
        steps.add_pool(
            pool, [each for each in active if each.queue in pool.queues], question.target_s
        )
        for pool in pools_of(
            {each.queue for each in active},
            [*workers.values()],
            question.workers,
            question.processes,
            default_processes,
        )
    )
    tags = steps.tags()
    return Forecast(
        made_at=now,
        until=until,
        step_s=question.step_s,
        target_s=question.target_s,
        due=sum(tag.due for tag in tags),
        paused=rounded(sum(each.tasks for each in paused if question.tag in (None, each.tag))),
        is_estimate=any(one.due.is_estimate for one in found),
        steps=steps.steps(),
        tags=tags,
        pools=pools,
        notes=tuple(_notes(workers, pools, tag_rates, policies)),
        missing=missing,
    )


def _divided(
    counts: Sequence[DueCount], policies: Sequence[Policy]
) -> tuple[list[DueCount], list[DueCount]]:
    """Return the tasks of paused tags and queues, and all others."""
    names = {(policy.kind, policy.name) for policy in policies if policy.is_paused}
    paused: list[DueCount] = []
    active: list[DueCount] = []
    for each in counts:
        is_paused = ("tag", each.tag) in names or ("queue", each.queue) in names
        (paused if is_paused else active).append(each)
    return paused, active


def _notes(
    workers: Collection[str],
    pools: Sequence[ForecastPool],
    rates: Mapping[str, TagRate],
    policies: Sequence[Policy],
) -> list[str]:
    """Return sentences about what the forecast assumes or leaves out."""
    found: list[str] = []
    if not workers and pools:
        found.append("No worker is alive, so their number and that of their processes is assumed.")
    if unserved := [queue for pool in pools if not pool.workers for queue in pool.queues]:
        found.append(f"No worker serves the queues {_listed(unserved)}.")
    for source, what in (("assumed", "is assumed"), ("given", "is the given rate")):
        if tags := sorted(tag for tag, rate in rates.items() if rate.source == source):
            found.append(f"The speed of tags without measurements {what}: {_listed(tags)}.")
    limited = {policy.name for policy in policies if policy.key_concurrency is not None}
    if tags := sorted(limited & rates.keys()):
        found.append(f"Limits for each concurrency key are not simulated: {_listed(tags)}.")
    return found


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return ", ".join(map(repr, names[:MAX_NAMES])) + more
