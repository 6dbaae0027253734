"""Pauses, resumes and limits tags and queues."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from delaytasks.loops import CallGroup, twin
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import actor_of, check_delay, check_instant, invalid
from delaytasks.model.moves import Status
from delaytasks.model.policies import (
    UNCHANGED,
    Kind,
    Policy,
    Unchanged,
    check_limit,
    named,
    parse_rate,
)

if TYPE_CHECKING:
    from delaytasks.db.policy_rows import PolicyTable, RowCount
    from delaytasks.model.inputs import Delay


#: The fields of a policy without pause and limits.
_LIMITS = ("concurrency", "concurrency_per_key", "rate", "rate_period_s")
NO_POLICY = {"is_paused": False, "paused_until": None, **dict.fromkeys(_LIMITS)}


class PolicyCalls(CallGroup):
    """The pauses and limits of tags and queues, as `delays.policies`.

    They are stored in the database, and every worker follows a change within about a second. Each
    method has an asynchronous twin for coroutines, such as `apause` for `pause`.

    Examples
    --------
    >>> delays.policies.pause(tag="mail.send")
    >>> delays.policies.set(tag="mail.send", concurrency=10, rate="100/s")
    """

    def pause(
        self,
        *,
        tag: str | None = None,
        queue: str | None = None,
        until: datetime | Delay | None = None,
        actor: str | None = None,
    ) -> Policy:
        """Stop starting tasks of a tag or queue, within about a second.

        Running tasks finish. Tasks that fall due are HELD until `resume`, or until the sweep after
        `until`. A call with `until` never shortens a pause: a processor cannot end the pause of an
        operator. A call without `until` makes a pause last until `resume`.

        Parameters
        ----------
        tag, queue
            The tag or the queue.
        until
            The end of the pause, which is not over yet: an aware datetime, or a time from now as
            seconds, text such as `"2h"`, or a timedelta. The clock of the database counts.
        actor
            The name in the policy's history. By default the user of this process.

        Returns
        -------
        Policy
            The policy of the tag or queue.

        Raises
        ------
        InvalidInputError
            Unless exactly one of `tag` and `queue` is given, or if `until` is over.
        StoreUnavailableError
            If the database cannot be reached.

        Examples
        --------
        >>> delays.policies.pause(tag="mail.send")
        >>> delays.policies.pause(tag="partner.call", until="2h")
        """
        of, runtime = named(tag, queue), self._runtime
        if until is not None:
            now = runtime.clock.certain_now()
            if isinstance(until, datetime):
                until = check_instant(until, "until")
            else:
                until = now + check_delay(until, "until")
            if until <= now:
                remedy = "pass a later instant, a time from now such as '2h', or call resume"
                problem = f"is over, as it is {now:%Y-%m-%d %H:%M:%S} UTC: {remedy}"
                raise invalid("until", problem)
        return self._change(of, {"is_paused": True, "paused_until": until}, actor)

    apause = twin(pause)

    def resume(
        self, *, tag: str | None = None, queue: str | None = None, actor: str | None = None
    ) -> Policy:
        """End a pause. The next sweep begins to release the HELD tasks.

        They run in the order of their due times. A task whose tag and queue were both paused waits
        until both are resumed.

        Parameters
        ----------
        tag, queue, actor
            See `pause`.

        Returns
        -------
        Policy
            The policy of the tag or queue.

        Raises
        ------
        InvalidInputError, StoreUnavailableError
            See `pause`.

        Examples
        --------
        >>> delays.policies.resume(tag="mail.send")
        """
        return self._change(named(tag, queue), {"is_paused": False, "paused_until": None}, actor)

    aresume = twin(resume)

    def set(
        self,
        *,
        tag: str | None = None,
        queue: str | None = None,
        concurrency: int | Unchanged | None = UNCHANGED,
        concurrency_per_key: int | Unchanged | None = UNCHANGED,
        rate: str | Unchanged | None = UNCHANGED,
        actor: str | None = None,
    ) -> Policy:
        """Limit how many tasks of a tag run simultaneously or start in a period.

        Each limit applies to all workers together. None removes a limit; an argument that is left
        out does not change its limit.

        Parameters
        ----------
        tag, queue
            The tag. A queue can be paused, but has no limits: `queue` raises an error.
        concurrency
            The most tasks that run simultaneously.
        concurrency_per_key
            The most tasks of one limit key that run simultaneously.
        rate
            The most tasks that start in a period, such as `"100/s"` or `"30/m"`.
        actor
            See `pause`.

        Returns
        -------
        Policy
            The policy of the tag.

        Raises
        ------
        InvalidInputError
            If a limit is wrong, no limit is given, or `tag` is not given.
        StoreUnavailableError
            See `pause`.

        Examples
        --------
        >>> delays.policies.set(tag="mail.send", concurrency=10, rate="100/s")
        """
        kind, name = named(tag, queue)
        if kind == "queue":
            rule = f"queue {name!r} can be paused, and limits are for tags: name its tags"
            raise InvalidInputError(rule, "queue")
        limits = {"concurrency": concurrency, "concurrency_per_key": concurrency_per_key}
        given = [(limit, value) for limit, value in limits.items() if value is not UNCHANGED]
        changes: dict[str, Any] = {limit: check_limit(value, limit) for limit, value in given}
        if rate is not UNCHANGED:
            changes["rate"], changes["rate_period_s"] = parse_rate(rate)
        if not changes:
            rule = "say what is limited: concurrency, concurrency_per_key or rate"
            raise InvalidInputError(rule, "concurrency")
        return self._change((kind, name), changes, actor)

    aset = twin(set)

    def remove(
        self, *, tag: str | None = None, queue: str | None = None, actor: str | None = None
    ) -> Policy:
        """Remove the pause and all limits of a tag or queue.

        Parameters
        ----------
        tag, queue, actor
            See `pause`.

        Returns
        -------
        Policy
            The empty policy of the tag or queue.

        Raises
        ------
        InvalidInputError, StoreUnavailableError
            See `pause`.

        Examples
        --------
        >>> delays.policies.remove(tag="mail.send")
        """
        return self._change(named(tag, queue), NO_POLICY, actor)

    aremove = twin(remove)

    def list(self, *, tag: str | None = None, queue: str | None = None) -> list[Policy]:
        """Read the pauses and limits, with the numbers of paused and running tasks.

        Parameters
        ----------
        tag, queue
            Read only the policy of this tag or queue.

        Returns
        -------
        list of Policy
            The tags and queues that are paused or limited.

        Examples
        --------
        >>> [policy.name for policy in delays.policies.list() if policy.is_paused]
        ['mail.send']
        """
        only = () if tag is None and queue is None else (named(tag, queue),)
        table = self._runtime.store.policies
        return with_counts(table, table.read(*only))[0]

    alist = twin(list)

    def _change(
        self, of: tuple[Kind, str], changes: Mapping[str, Any], actor: str | None
    ) -> Policy:
        runtime, (kind, name), who = self._runtime, of, actor_of(actor)
        policy, is_new = runtime.store.policies.set(kind, name, changes, who)
        if is_new:
            new_values = {field: getattr(policy, field) for field in changes}
            runtime.events.emit(
                "policy.changed", kind=kind, policy=name, changes=repr(new_values), actor=who
            )
        return policy


def with_counts(table: PolicyTable, policies: Iterable[Policy]) -> tuple[list[Policy], int | None]:
    """Return the policies by kind and name, with the numbers of their rows.

    The second value is the number of all HELD rows. Without a policy, nothing is counted.
    """
    policies = sorted(policies, key=lambda policy: (policy.kind, policy.name))
    if not policies:
        return [], None
    counts = {status: table.count(status) for status in (Status.HELD, Status.RUNNING)}
    by_name: defaultdict[tuple[str, str, Status], list[RowCount]] = defaultdict(list)
    for status, found in counts.items():
        for (tag, queue), count in found.items():
            by_name["tag", tag, status].append(count)
            by_name["queue", queue, status].append(count)

    def counted(policy: Policy) -> Policy:
        held, running = (by_name[policy.kind, policy.name, status] for status in counts)
        return replace(
            policy,
            held=sum(each.rows for each in held),
            running=sum(each.rows for each in running),
            held_since=min((each.first_due for each in held), default=None),
        )

    return list(map(counted, policies)), sum(each.rows for each in counts[Status.HELD].values())
