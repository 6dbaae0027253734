"""Pauses, resumes and limits tags and queues. Each database has every policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from delaytasks.core.actors import actor_of
from delaytasks.core.errors import InvalidPolicyError, StoreUnavailableError
from delaytasks.core.events import Events
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
from delaytasks.routing.shard import EACH_SHARD_S, Shard

if TYPE_CHECKING:
    from delaytasks.sharding.router import Router
    from delaytasks.storage.policies import PolicyTable, RowCount

T = TypeVar("T")
_EMPTY: dict[str, Any] = {
    "is_paused": False,
    "concurrency": None,
    "key_concurrency": None,
    "rate": None,
    "rate_period_s": None,
}


class CountedPolicies(NamedTuple):
    """Policies, and the rows of which they say the numbers."""

    policies: list[Policy]
    #: The number of HELD rows of each database in which they were counted.
    held: Mapping[int, int]


class PolicyOperations:
    def __init__(self, router: Router, events: Events) -> None:
        self._router = router
        self._events = events

    def read(self, tag: str | None, queue: str | None) -> list[Policy]:
        return self._read(*(() if tag is None and queue is None else named(tag, queue))).policies

    def read_all(self) -> CountedPolicies:
        """Return all policies, and the number of all HELD rows from the same queries."""
        return self._read()

    def _read(self, *only: Any) -> CountedPolicies:
        def read(shard: Shard) -> tuple[list[Policy], int | None]:
            table = shard.store.policies
            return _counted(table.read(*only), table)

        answers, down = self._ask(read)
        if not answers:
            raise next(iter(down.values()))
        by_shard = {
            number: {(policy.kind, policy.name): policy for policy in policies}
            for number, (policies, _) in answers.items()
        }
        names = {name for policies in by_shard.values() for name in policies}
        merged = (
            _merged({number: policies.get(name) for number, policies in by_shard.items()}, down)
            for name in sorted(names)
        )
        held = {number: rows for number, (_, rows) in answers.items() if rows is not None}
        return CountedPolicies([each for each in merged if not each.is_empty or each.held], held)

    def pause(self, tag: str | None, queue: str | None, actor: str | None) -> Policy:
        return self._set(*named(tag, queue), {"is_paused": True}, actor)

    def resume(self, tag: str | None, queue: str | None, actor: str | None) -> Policy:
        return self._set(*named(tag, queue), {"is_paused": False}, actor)

    def set_limits(
        self,
        tag: str | None,
        queue: str | None,
        concurrency: int | Unchanged | None,
        key_concurrency: int | Unchanged | None,
        rate: str | Unchanged | None,
        actor: str | None,
    ) -> Policy:
        kind, name = named(tag, queue)
        if kind == "queue":
            raise InvalidPolicyError(
                f"queue {name!r} can be paused, and limits are for tags: name the tags of the queue"
            )
        changes: dict[str, Any] = {}
        if concurrency is not UNCHANGED:
            changes["concurrency"] = check_limit(concurrency, "concurrency")
        if key_concurrency is not UNCHANGED:
            changes["key_concurrency"] = check_limit(key_concurrency, "key_concurrency")
        if rate is not UNCHANGED:
            changes["rate"], changes["rate_period_s"] = parse_rate(rate)
        if not changes:
            raise InvalidPolicyError("say what is limited: concurrency, key_concurrency or rate")
        return self._set(kind, name, changes, actor)

    def clear(self, tag: str | None, queue: str | None, actor: str | None) -> Policy:
        return self._set(*named(tag, queue), _EMPTY, actor)

    def _set(self, kind: Kind, name: str, changes: dict[str, Any], actor: str | None) -> Policy:
        who = actor_of(actor)
        answers, down = self._ask(lambda shard: shard.store.policies.set(kind, name, changes, who))
        changed = [policy for policy, is_new in answers.values() if is_new]
        if changed:
            new_values = {field: getattr(changed[0], field) for field in changes}
            self._events.emit(
                "policy.changed", kind=kind, policy=name, changes=repr(new_values), actor=who
            )
        if down:
            self._refuse_incomplete(kind, name, list(answers), down)
        return _merged({number: policy for number, (policy, _) in answers.items()}, {})

    def _refuse_incomplete(
        self, kind: Kind, name: str, done: list[int], down: dict[int, StoreUnavailableError]
    ) -> None:
        """Raise the error for a policy that some shards do not have now."""
        error = next(iter(down.values()))
        if len(self._router.shards) == 1:
            raise error
        where = f"it is so in shard {', '.join(map(str, done))}" if done else "it is so nowhere"
        raise StoreUnavailableError(
            f"the policy of {kind} {name!r} could not be set in shard "
            f"{', '.join(map(str, down))}, {where}; do it again when all are back ({error})"
        ) from error

    def _ask(
        self, work: Callable[[Shard], T]
    ) -> tuple[dict[int, T], dict[int, StoreUnavailableError]]:
        """Return the answers and the errors of the shards, by their numbers."""
        answers: dict[int, T] = {}
        down: dict[int, StoreUnavailableError] = {}

        def ask(shard: Shard) -> None:
            try:
                answers[shard.number] = work(shard)
            except StoreUnavailableError as error:
                down[shard.number] = error

        for silent in self._router.each(ask):
            down[silent.number] = StoreUnavailableError(
                f"{silent} has not answered for {EACH_SHARD_S:g} s"
            )
        return dict(sorted(answers.items())), dict(sorted(down.items()))


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


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _first(times: Iterable[datetime | None]) -> datetime | None:
    return min((at for at in times if at is not None), default=None)


def _merged(found: dict[int, Policy | None], down: dict[int, StoreUnavailableError]) -> Policy:
    """Return the policy as it was set last, with the shards where it differs or is unknown."""
    known = [policy for policy in found.values() if policy is not None]
    last = max(
        known,
        key=lambda policy: (policy.update_time is not None, policy.update_time, policy.version),
    )
    others = [
        number for number, policy in found.items() if policy is None or not _is_equal(policy, last)
    ]
    unapplied = [policy for policy in known if not policy.is_applied]
    return replace(
        unapplied[0] if unapplied and not others else last,
        held=_total(policy.held for policy in known),
        running=_total(policy.running for policy in known),
        held_since=_first(policy.held_since for policy in known),
        missing=tuple(sorted([*others, *down])),
    )


def _is_equal(one: Policy, other: Policy) -> bool:
    return (one.is_paused, one.limits) == (other.is_paused, other.limits)
