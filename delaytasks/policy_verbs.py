"""The verbs for policies: pause, resume, limit. With several databases each of them has the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from delaytasks.core.actors import actor_of
from delaytasks.core.errors import InvalidPolicyError, StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.core.policies import Kind, Policy, check_limit, named, parse_rate

if TYPE_CHECKING:
    from delaytasks.sharding.router import ShardRouter
    from delaytasks.sharding.shard import Shard
    from delaytasks.storage.policies import PolicyTable

T = TypeVar("T")


class Unchanged(Enum):
    """What a call does not mention stays as it is."""

    UNCHANGED = "unchanged"


UNCHANGED = Unchanged.UNCHANGED
_NOTHING: dict[str, Any] = {
    "is_paused": False,
    "concurrency": None,
    "key_concurrency": None,
    "rate": None,
    "rate_period_s": None,
}


class PolicyVerbs(ABC):
    """The verbs, for a class that brings their parts."""

    events: Events

    @property
    @abstractmethod
    def routes(self) -> ShardRouter: ...

    def policies(self, *, tag: str | None = None, queue: str | None = None) -> list[Policy]:
        """Return the tags and queues that are paused or limited, and how many of their tasks are held and run.

        With `tag` or `queue` the list has the policy of that one, if there is one.
        """
        only = () if tag is None and queue is None else named(tag, queue)

        def read(shard: Shard) -> list[Policy]:
            table = shard.store.policies
            return _counted(table.read(*only), table)

        answers, down = self._ask(read)
        if not answers:
            raise next(iter(down.values()))
        found = {(policy.kind, policy.name) for policies in answers.values() for policy in policies}
        by_shard = {
            number: {(p.kind, p.name): p for p in policies} for number, policies in answers.items()
        }
        merged = (
            _merged({number: policies.get(name) for number, policies in by_shard.items()}, down)
            for name in sorted(found)
        )
        return [policy for policy in merged if not policy.is_empty or policy.held]

    def pause(
        self, *, tag: str | None = None, queue: str | None = None, actor: str | None = None
    ) -> Policy:
        """Nothing more of the tag or queue begins, within about a second; what runs may finish. Tasks that wait are
        HELD until `resume`. `actor` is who did it, if not the
        user of this process."""
        return self._set(*named(tag, queue), {"is_paused": True}, actor)

    def resume(
        self, *, tag: str | None = None, queue: str | None = None, actor: str | None = None
    ) -> Policy:
        """What was held of the tag or queue waits again, in the order of its due times, unless something else holds
        it: its tag and its queue may both be paused."""
        return self._set(*named(tag, queue), {"is_paused": False}, actor)

    def set_policy(
        self,
        tag: str,
        *,
        concurrency: int | Unchanged | None = UNCHANGED,
        key_concurrency: int | Unchanged | None = UNCHANGED,
        rate: str | Unchanged | None = UNCHANGED,
        actor: str | None = None,
    ) -> Policy:
        """Limits a tag: `concurrency` of its tasks run at once, of all workers together; `key_concurrency` of each
        `concurrency_key`; `rate` ("100/s", "30/m") begin. None takes a limit away; what is not mentioned stays."""
        changes: dict[str, Any] = {}
        if concurrency is not UNCHANGED:
            changes["concurrency"] = check_limit(concurrency, "concurrency")
        if key_concurrency is not UNCHANGED:
            changes["key_concurrency"] = check_limit(key_concurrency, "key_concurrency")
        if rate is not UNCHANGED:
            changes["rate"], changes["rate_period_s"] = parse_rate(rate)
        if not changes:
            raise InvalidPolicyError("say what is limited: concurrency, key_concurrency or rate")
        return self._set(*named(tag, None), changes, actor)

    def clear_policy(
        self, *, tag: str | None = None, queue: str | None = None, actor: str | None = None
    ) -> Policy:
        """The tag or queue is neither paused nor limited any more."""
        return self._set(*named(tag, queue), _NOTHING, actor)

    # -- inside -----------------------------------------------------------------------------------

    def _set(self, kind: Kind, name: str, changes: dict[str, Any], actor: str | None) -> Policy:
        who = actor_of(actor)

        def change(shard: Shard) -> tuple[Policy, bool]:
            return shard.store.policies.set(kind, name, changes, who)

        answers, down = self._ask(change)
        if any(is_new for _, is_new in answers.values()):
            policy = next(policy for policy, is_new in answers.values() if is_new)
            said = {field: getattr(policy, field) for field in changes}
            self.events.emit(
                "policy.changed", kind=kind, policy=name, changes=repr(said), actor=who
            )
        if down:
            self._refuse_half(kind, name, list(answers), down)
        return _merged({number: policy for number, (policy, _) in answers.items()}, {})

    def _refuse_half(
        self, kind: Kind, name: str, done: list[int], down: dict[int, StoreUnavailableError]
    ) -> None:
        error = next(iter(down.values()))
        if len(self.routes.shards) == 1:
            raise error
        where = f"it is so in shard {', '.join(map(str, done))}" if done else "it is so nowhere"
        raise StoreUnavailableError(
            f"the policy of {kind} {name!r} could not be set in shard {', '.join(map(str, down))}, {where}; "
            f"do it again when all are back ({error})"
        ) from error

    def _ask(
        self, work: Callable[[Shard], T]
    ) -> tuple[dict[int, T], dict[int, StoreUnavailableError]]:
        """What each shard answers, by its number; and why some of them do not."""
        from delaytasks.sharding.router import EACH_S

        answers: dict[int, T] = {}
        down: dict[int, StoreUnavailableError] = {}

        def ask(shard: Shard) -> None:
            try:
                answers[shard.number] = work(shard)
            except StoreUnavailableError as error:
                down[shard.number] = error

        for silent in self.routes.each(ask):
            down[silent.number] = StoreUnavailableError(
                f"{silent} has not answered for {EACH_S:g} s"
            )
        return dict(sorted(answers.items())), dict(sorted(down.items()))


def _counted(policies: list[Policy], table: PolicyTable) -> list[Policy]:
    if not policies:
        return []
    held, running = _by_policy(table.held()), _by_policy(table.running())

    def count(policy: Policy) -> Policy:
        name = policy.kind, policy.name
        return replace(policy, held=held[name], running=running[name])

    return [count(policy) for policy in policies]


def _by_policy(counts: dict[tuple[str, str], int]) -> Counter[tuple[Kind, str]]:
    """How many rows each tag, and each queue, has."""
    found: Counter[tuple[Kind, str]] = Counter()
    for (tag, queue), count in counts.items():
        found["tag", tag] += count
        found["queue", queue] += count
    return found


def _total(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _merged(found: dict[int, Policy | None], down: dict[int, StoreUnavailableError]) -> Policy:
    """One policy of all shards: as it was set last, and where it is not so."""
    known = [policy for policy in found.values() if policy is not None]
    last = max(
        known,
        key=lambda policy: (policy.update_time is not None, policy.update_time, policy.version),
    )
    others = [
        number
        for number, policy in found.items()
        if policy is None or not _says_the_same(policy, last)
    ]
    unapplied = [policy for policy in known if not policy.is_applied]
    return replace(
        unapplied[0] if unapplied and not others else last,
        held=_total(policy.held for policy in known),
        running=_total(policy.running for policy in known),
        missing=tuple(sorted([*others, *down])),
    )


def _says_the_same(one: Policy, other: Policy) -> bool:
    return (one.is_paused, one.limits) == (other.is_paused, other.limits)
