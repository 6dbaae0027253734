"""Explain why no worker takes the tasks of a queue and a tag."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice
from shlex import quote

from delaytasks.core.celery_tags import processor_tag
from delaytasks.core.durations import show_duration
from delaytasks.core.reasons import Reason
from delaytasks.core.registered_worker import RegisteredWorker

#: Names in one sentence.
MOST_NAMES = 5


def unserved(
    queue: str, tag: str, workers: Sequence[RegisteredWorker], namespace: str
) -> Reason | None:
    """Return why no live worker can run tasks of this queue and tag; None if one probably can.

    `namespace` is the prefix of the queues in the broker.
    """
    serving = [worker for worker in workers if worker.serves(queue)]
    alive = [worker for worker in serving if worker.is_alive]
    if not alive:
        return _no_worker(queue, serving, workers, namespace)
    known_as = {tag, processor_tag(tag)}
    if all(worker.tags is not None and not known_as & worker.tags for worker in alive):
        names = _names([worker.name for worker in alive])
        return Reason(
            "no_processor",
            f"No worker of the queue {queue} has a processor for the tag {tag} ({names}).",
            "Import the module of the processor in the worker (Celery's imports or include), or "
            "correct the tag.",
            {"queue": queue, "tag": tag, "workers": [worker.name for worker in alive]},
        )
    return None


def _no_worker(
    queue: str,
    serving: Sequence[RegisteredWorker],
    workers: Sequence[RegisteredWorker],
    namespace: str,
) -> Reason:
    sentence = f"No live worker serves the queue {queue}"
    alive = [worker for worker in workers if worker.is_alive]
    live_queues = sorted({name for worker in alive for name in worker.queues})
    remedy = "Start a worker: celery -A … worker"
    if live_queues:
        remedy = one_more_worker([queue], namespace)
    elif alive:  # -Q of the live workers names none of our queues
        name = quote(f"{namespace}.{queue}")
        remedy = (
            f"Add {name} to the -Q of a worker, or start one more: celery -A … worker -Q {name}"
        )
    if serving:
        last = min(serving, key=lambda worker: worker.age_s)
        sentence += f"; {last.name}, which did, was seen {show_duration(last.age_s)} ago"
    elif alive:
        served = _names(live_queues) or "no queue of delaytasks"
        sentence += f"; live workers serve {served} ({_names([each.name for each in alive])})"
    elif not workers:
        sentence += "; no worker runs"
    return Reason(
        "no_worker",
        f"{sentence}.",
        remedy,
        {"queue": queue, "live_queues": live_queues, "last_seen": _last_seen(serving)},
    )


def one_more_worker(queues: Collection[str], namespace: str) -> str:
    """Return the remedy for queues that no worker serves, while other workers run.

    With -Q a worker serves no other queues, not even those of the app's own tasks.
    """
    names = quote(",".join(f"{namespace}.{queue}" for queue in islice(queues, MOST_NAMES)))
    return f"Start one more worker: celery -A … worker -Q {names}"


def _last_seen(serving: Sequence[RegisteredWorker]) -> dict[str, float]:
    return {worker.name: round(worker.age_s, 3) for worker in serving}


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more
