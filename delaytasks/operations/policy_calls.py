"""Pauses, resumes and limits tags and queues."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from delaytasks.core.errors import InvalidInputError
from delaytasks.core.inputs import actor_of
from delaytasks.core.policies import (
    UNCHANGED,
    Kind,
    Policy,
    Unchanged,
    check_limit,
    named,
    parse_rate,
)
from delaytasks.core.states import Status

if TYPE_CHECKING:
    from delaytasks.runtime import Runtime
    from delaytasks.storage.policy_rows import PolicyTable, RowCount


#: The fields of a policy without pause and limits.
NO_POLICY: dict[str, Any] = {
    "is_paused": False,
    "concurrency": None,
    "key_concurrency": None,
    "rate": None,
    "rate_period_s": None,
}


class CountedPolicies(NamedTuple):
    """Policies, and the number of all HELD rows if they were counted."""

    policies: list[Policy]
    held: int | None


def read_policies(table: PolicyTable, *only: Any) -> CountedPolicies:
    """Return all policies, or that of a kind and a name, with the numbers of their rows."""
    policies, held = _counted(table.read(*only), table)
    policies.sort(key=lambda policy: (policy.kind, policy.name))
    return CountedPolicies([each for each in policies if not each.is_empty or each.held], held)


def change_policy(
    runtime: Runtime, tag: str | None, queue: str | None, changes: dict[str, Any], actor: str | None
) -> Policy:
    """Change fields of the policy of a tag or queue, and return it."""
    kind, name = named(tag, queue)
    who = actor_of(actor)
    policy, is_new = runtime.store.policies.set(kind, name, changes, who)
    if is_new:
        new_values = {field: getattr(policy, field) for field in changes}
        runtime.events.emit(
            "policy.changed", kind=kind, policy=name, changes=repr(new_values), actor=who
        )
    return policy


def limits_of(
    tag: str | None,
    queue: str | None,
    concurrency: int | Unchanged | None,
    key_concurrency: int | Unchanged | None,
    rate: str | Unchanged | None,
) -> dict[str, Any]:
    """Return the checked fields that `set_policy` changes."""
    kind, name = named(tag, queue)
    if kind == "queue":
        raise InvalidInputError(
            f"queue {name!r} can be paused, and limits are for tags: name the tags of the queue",
            "queue",
        )
    changes: dict[str, Any] = {}
    if concurrency is not UNCHANGED:
        changes["concurrency"] = check_limit(concurrency, "concurrency")
    if key_concurrency is not UNCHANGED:
        changes["key_concurrency"] = check_limit(key_concurrency, "key_concurrency")
    if rate is not UNCHANGED:
        changes["rate"], changes["rate_period_s"] = parse_rate(rate)
    if not changes:
        raise InvalidInputError(
            "say what is limited: concurrency, key_concurrency or rate", "concurrency"
        )
    return changes


def _counted(policies: list[Policy], table: PolicyTable) -> tuple[list[Policy], int | None]:
    """Return the policies with the numbers of their rows, and the number of all HELD rows.

    Without a policy, nothing is counted.
    """
    if not policies:
        return [], None
    counts = table.count(Status.HELD)
    held, running = _by_policy(counts), _by_policy(table.count(Status.RUNNING))

    def count(policy: Policy) -> Policy:
        name = policy.kind, policy.name
        mine = held.get(name, [])
        return replace(
            policy,
            held=sum(each.rows for each in mine),
            running=sum(each.rows for each in running.get(name, ())),
            held_since=min((each.first_due for each in mine), default=None),
        )

    return [count(policy) for policy in policies], sum(each.rows for each in counts.values())


def _by_policy(
    counts: Mapping[tuple[str, str], RowCount],
) -> Mapping[tuple[Kind, str], list[RowCount]]:
    """Return the counts of each tag and of each queue."""
    found: defaultdict[tuple[Kind, str], list[RowCount]] = defaultdict(list)
    for (tag, queue), count in counts.items():
        found["tag", tag].append(count)
        found["queue", queue].append(count)
    return found
