"""Explain why the overdue tasks of a queue and a tag have not begun."""

from __future__ import annotations

from collections.abc import Sequence

from delaytasks.core.interfaces import OverdueGroup
from delaytasks.core.policies import Policy
from delaytasks.core.reasons import Reason
from delaytasks.core.registered_worker import RegisteredWorker
from delaytasks.core.why_unserved import unserved

_DEFERRED = {
    "no_processor": (
        "No worker that tried them has a processor for the tag {tag}; is its module imported?"
    ),
    "no_key": (
        "No worker that tried them has the encryption key of their bodies "
        "(delaytasks_encryption_keys)."
    ),
    "no_time_limits": (
        "The tag {tag} has time limits, which need a worker with -P prefork on the queue {queue}."
    ),
    "newer_body": (
        "Their bodies are of a newer version of the tag {tag} than the workers' processors: deploy "
        "the new code to the workers."
    ),
    "deferred": "A worker could not run them, and deferred them.",
}


def why_late(
    late: OverdueGroup,
    workers: Sequence[RegisteredWorker],
    policies: Sequence[Policy],
    namespace: str,
) -> Reason:
    """Return the most important reason why the tasks of a queue and a tag have not begun."""
    queue, tag = late.queue, late.tag
    for policy in policies:
        if policy.is_paused and (policy.kind, policy.name) in (("tag", tag), ("queue", queue)):
            return Reason("paused", f"The {policy.kind} {policy.name} is paused.")
    no_worker = unserved(queue, tag, workers, namespace)
    if no_worker is not None:
        return no_worker
    if late.cause is not None:
        return Reason(late.cause, _DEFERRED[late.cause].format(tag=tag, queue=queue))
    if any(
        policy.kind == "tag" and policy.name == tag and policy.has_limits for policy in policies
    ):
        return Reason("limit", f"The tag {tag} has limits, and its tasks wait for each other.")
    return Reason("due", "They wait for a worker of the queue to be free.")
