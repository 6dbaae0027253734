"""`Shards`: several `DelayTasks` used as one, each with a database and a namespace of its own.

Nothing below this class knows about it. It decides which member a call is for, and calls that
member:

- A new task with a key goes to the member that a hash of tag and key selects. A new task without a
  key goes to each member in turn.
- An id contains the number of the member that made it (`delaytasks_shard`), so a call that names a
  task by its id asks this member first. Ids of other programs contain arbitrary numbers, so the
  other members are asked if this member does not have the task.
- Anything else is a call of one member, or of every member by `each`.

No row moves when a member is added at the end of the list. So a call that names a task by its key
asks the member of the key first, and then the others, which may have the task since before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from operator import methodcaller
from typing import Any, Concatenate, ParamSpec, TypeVar

from delaytasks.client import DelayTasks
from delaytasks.loops import twin
from delaytasks.model import errors
from delaytasks.model.clock import monotonic, shard_of
from delaytasks.model.filters import batches
from delaytasks.model.inputs import check_key
from delaytasks.model.task import TaskName, id_of, new_task_of

P = ParamSpec("P")
T = TypeVar("T")
#: A member that was unavailable gets no tasks without a key for this time, if others are available.
REST_S = 5.0

Method = Callable[Concatenate[DelayTasks, P], T]
MethodOfShards = Callable[Concatenate["Shards", P], T]

# Each of the next functions makes a method of `Shards` from a method of `DelayTasks`, with the same
# parameters.


def _calling(method: Callable[..., T], /, *args: Any, **options: Any) -> Callable[[Any], T]:
    if options.get("session") is not None:
        raise errors.InvalidInputError("with session=, call shards.member(tag, key)", "session")
    return methodcaller(method.__name__, *args, **options)


def _for_new(method: Method[P, T]) -> MethodOfShards[P, T]:
    """Schedule at the member for the task, or at any member."""

    def call(self: Shards, /, tag: Any, *args: Any, **options: Any) -> Any:
        return self._schedule(tag, options, _calling(method, tag, *args, **options))

    return functools.wraps(method)(call)  # type: ignore[return-value]


def _for_batches(method: Method[P, int]) -> MethodOfShards[P, int]:
    """Schedule each batch at the members for its tasks. All tasks that may be anywhere go to one
    member, so that they are one transaction."""

    def call(self: Shards, /, tasks: Iterable[Any], **options: Any) -> int:
        # Imported here: a process that only imports delaytasks does not need it.
        from delaytasks.db.producer import BULK

        total = 0
        for batch in batches(map(new_task_of, tasks), BULK):
            parts: dict[tuple[DelayTasks, ...], list[Any]] = {}
            anywhere = self._in_turn()
            for new in batch:
                members = self._members_for(new.tag, new.key, new.id) or anywhere
                parts.setdefault(members, []).append(new)
            for members, part in parts.items():
                total += self._first_available(members, _calling(method, part, **options))
        return total

    return functools.wraps(method)(call)  # type: ignore[return-value]


def _for_one(method: Method[P, T]) -> MethodOfShards[P, T]:
    """Ask one member after the other until one has the task."""

    def call(self: Shards, /, task: Any = None, *args: Any, **options: Any) -> Any:
        return self._ask_in_turn(_calling(method, task, *args, **options), task, **options)

    return functools.wraps(method)(call)


class Shards:
    """Several `DelayTasks` used as one.

    The methods have the parameters, results and errors of the methods of `DelayTasks` with the
    same names, except that `session` is refused, and `touch` takes one task. In a transaction of
    your own, call the member whose database it is on. What concerns many tasks, such as `find`, is
    a call of each member. What waits has an asynchronous twin, such as `acancel` for `cancel`.

    Parameters
    ----------
    members
        The `DelayTasks`, a new one at the end. Each has a Celery app of its own, and a
        `delaytasks_shard`, a namespace and a database that no other member has.

    Attributes
    ----------
    members
        The `DelayTasks`, in their order.

    Raises
    ------
    ConfigError
        If two members have the same number, namespace or database.

    Examples
    --------
    >>> shards = Shards([DelayTasks(app_0, url_0, shard=0, namespace="shop-0"),
    ...                  DelayTasks(app_1, url_1, shard=1, namespace="shop-1")])
    >>> task = shards.schedule_delay("order.close", {"order": 7}, "30m", key="7")
    >>> shards.cancel(task.id)
    """

    def __init__(self, members: Iterable[DelayTasks]) -> None:
        self.members: Sequence[DelayTasks] = tuple(members)
        if not self.members:
            raise errors.ConfigError("Shards needs a member")
        for what, fact in _DISTINCT.items():
            if len({fact(member.settings) for member in self.members}) < len(self.members):
                raise errors.ConfigError(f"members of Shards share a {what}: give each its own")
        self._run_async = self.members[0]._run_async  # its threads call the other members as well
        self._by_number = {member.settings.shard: member for member in self.members}
        self._turns = itertools.count()
        self._rests_until: dict[DelayTasks, float] = {}

    # -- choose a member --------------------------------------------------------------------------

    def member(self, tag: str, key: str) -> DelayTasks:
        """Return the member for tasks with a key.

        It is selected by rendezvous hashing: a new member takes keys from every other member, and
        no key moves between the others.

        Parameters
        ----------
        tag, key
            The tag and key.

        Returns
        -------
        DelayTasks
            The member, for calls with `session=`.

        Examples
        --------
        >>> member = shards.member("order.close", "7")
        >>> member.schedule_delay("order.close", {"order": 7}, 1800, key="7", session=session)
        """
        name = f"{tag}\0{key}".encode(errors="surrogatepass")

        def weight(member: DelayTasks) -> bytes:
            return blake2b(name, digest_size=8, salt=b"%d" % member.settings.shard).digest()

        return max(self.members, key=weight)

    def member_of(self, task: TaskName) -> DelayTasks:
        """Return the member that made the id of a task.

        Parameters
        ----------
        task
            The id, or a task that was read.

        Returns
        -------
        DelayTasks
            The member.

        Raises
        ------
        InvalidInputError
            If no member has the number that the id contains.

        Examples
        --------
        >>> shards.member_of(task).cancel(task, session=session)
        """
        if (number := shard_of(id_of(task))) not in self._by_number:
            raise errors.InvalidInputError(f"no member has the number {number} of the id", "task")
        return self._by_number[number]

    def each(self, call: Callable[[DelayTasks], T]) -> dict[int, T]:
        """Call a function with every member, such as to find tasks or to pause a tag.

        Parameters
        ----------
        call
            A function of one `DelayTasks`.

        Returns
        -------
        dict
            The results by the numbers of the members.

        Raises
        ------
        StoreUnavailableError
            If a member is unavailable. The others were called, and the message names them.

        Examples
        --------
        >>> shards.each(lambda member: member.policies.pause(tag="mail.send"))
        >>> shards.each(lambda member: member.bulk.cancel(tag="mail.send").changed)
        {0: 700, 1: 500}
        """
        results, failure = dict[int, T](), None
        for number, member in self._by_number.items():
            try:
                results[number] = call(member)
            except errors.StoreUnavailableError as error:
                failure = failure or error
        if failure is not None:
            text = f"{failure} (members {[*results]} have done the call)"
            raise errors.StoreUnavailableError(
                text, failure.is_locked, failure.is_unable
            ) from failure
        return results

    def any(self, call: Callable[[DelayTasks], T]) -> T:
        """Call a function with the next member in turn that is available, as for a new task.

        Parameters
        ----------
        call
            A function of one `DelayTasks`.

        Returns
        -------
        object
            What the function returns.

        Examples
        --------
        >>> shards.any(lambda member: member.callbacks.post("https://partner.example", {}, 60))
        """
        return self._first_available(self._in_turn(), call)

    aany, aeach = twin(any), twin(each)

    # -- schedule ---------------------------------------------------------------------------------

    schedule_delay = _for_new(DelayTasks.schedule_delay)
    aschedule_delay = twin(schedule_delay)

    # -- one task ---------------------------------------------------------------------------------

    cancel = _for_one(DelayTasks.cancel)
    reschedule = _for_one(DelayTasks.reschedule)
    touch = _for_one(DelayTasks.touch)
    rerun = _for_one(DelayTasks.rerun)
    get = _for_one(DelayTasks.get)
    acancel, areschedule, atouch = twin(cancel), twin(reschedule), twin(touch)
    arerun, aget = twin(rerun), twin(get)

    # -- many tasks -------------------------------------------------------------------------------

    schedule_many = _for_batches(DelayTasks.schedule_many)
    aschedule_many = twin(schedule_many)

    # -- processors and connections ---------------------------------------------------------------

    def processor(self, tag: str, **options: Any) -> Callable[[T], T]:
        """Register the decorated function with every member. See `DelayTasks.processor`.

        Returns
        -------
        callable
            A decorator that returns the function itself.

        Examples
        --------
        >>> @shards.processor("order.close", retries="15s 3m 10m")
        ... def close_order(body): ...
        """

        def decorate(function: Any) -> Any:
            for member in self.members:
                member.processor(tag, **options)(function)
            return function

        return decorate

    def close(self) -> None:
        """Arm what waits to be armed, and close all connections. A later call opens them again.

        Examples
        --------
        >>> shards.close()
        """
        self.each(DelayTasks.close)

    async def aclose(self) -> None:
        """Close all connections. This is the asynchronous twin of `close`.

        Examples
        --------
        >>> await shards.aclose()
        """
        for member in self.members:
            await member.aclose()

    # -- internal ---------------------------------------------------------------------------------

    def _members_for(self, tag: str, key: str | None, id: int | None) -> tuple[DelayTasks, ...]:
        """Return the member that a new task goes to. Without any, it may go to all members."""
        if key is not None:
            return (self.member(tag, key),)
        return () if id is None else (self.member_of(id),)

    def _schedule(self, tag: str, options: Any, run: Callable[[DelayTasks], T]) -> T:
        members = self._members_for(tag, options.get("key"), options.get("id"))
        return self._first_available(members or self._in_turn(), run)

    def _in_turn(self) -> tuple[DelayTasks, ...]:
        """Return the next member, and then the others; those that were unavailable come last."""
        first, now = next(self._turns) % len(self.members), monotonic()
        order = [*self.members[first:], *self.members[:first]]
        return tuple(sorted(order, key=lambda member: self._rests_until.get(member, 0) > now))

    def _first_available(self, members: Sequence[DelayTasks], call: Callable[[DelayTasks], T]) -> T:
        for member in members[:-1]:
            try:
                return call(member)
            except errors.StoreUnavailableError:
                self._rests_until[member] = monotonic() + REST_S
        return call(members[-1])

    def _ask_in_turn(self, ask: Callable[[DelayTasks], T], task: Any, **name: Any) -> T:
        """Ask the member that most likely has the task, and then the others."""
        if None not in (name.get("tag"), name.get("key")):
            number = self.member(name["tag"], check_key(name["key"])).settings.shard
        else:  # without any name, the first member raises the error
            number = -1 if task is None else shard_of(id_of(task))
        members = sorted(self.members, key=lambda member: member.settings.shard != number)
        for member in members[:-1]:
            with suppress(errors.TaskNotFoundError):
                # `cancel` returns a result without a status instead of this error.
                if getattr(result := ask(member), "status", "") is not None:
                    return result
        return ask(members[-1])


_DISTINCT: dict[str, Callable[[Any], object]] = {
    "delaytasks_shard": lambda s: s.shard,
    "delaytasks_namespace": lambda s: s.namespace,
    "database": lambda s: (s.database_url or s.data_dir, s.table_prefix),
}
