"""What an operator has to know about a deployment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from delaytasks.core.durations import show_duration
from delaytasks.core.registered_worker import RegisteredWorker, beat_age_s

#: An outage of a worker's broker or timer, or a silence of beat, that is longer is mentioned.
OUTAGE_S = 15.0


def service_problems(
    workers: Sequence[RegisteredWorker], is_broker_down: bool = False
) -> Iterator[str]:
    """Yield a sentence about each worker without its broker or its timer, and one about beat.

    If the broker is down for everyone, that is one problem, which the caller reports.
    """
    for worker in workers:
        services = worker.services
        if not worker.is_alive or is_broker_down:
            continue
        for name, down_s in (
            ("its broker", services.broker_down_s),
            ("the server of its timer", services.timer_down_s),
        ):
            if down_s is not None and down_s > OUTAGE_S:
                yield (
                    f"The worker {worker.name} has not reached {name} for {show_duration(down_s)}. "
                    "It finds due tasks in the table, so they start some seconds late."
                )
    age_s = beat_age_s(workers)
    if age_s is not None and age_s > OUTAGE_S and not is_broker_down:
        yield (
            f"No message of beat has arrived for {show_duration(age_s)}. The workers sweep by "
            "themselves, less often. Is celery beat running?"
        )
