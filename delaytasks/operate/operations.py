"""The table of operations: what people and programs do with tasks, limits and schedules.

An operation has a name, typed parameters and a function that calls the public class, and it says
who may perform it. The options of the commands, the fields of forms, and the routes of the HTTP
API with their OpenAPI document are made from this table. The docstring of an operation is the help
of its command, and its first sentence is the summary of its routes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, tzinfo
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from delaytasks.model.body import FIRST_VERSION, MAX_VERSION
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.filters import MAX_ERROR_PATTERN, MAX_IDS
from delaytasks.model.inputs import (
    ACTOR_LENGTH,
    KEY_LENGTH,
    LIMIT_KEY_LENGTH,
    MAX_DELAY_S,
    MAX_PAIRS,
    MAX_PRIORITY,
    MAX_VALUE_LENGTH,
    PAGE_MAX,
    QUEUE_LENGTH,
    TAG_LENGTH,
    check_integer,
    check_shift,
    has_unit,
    parse_duration,
    parse_instant,
)
from delaytasks.model.moves import Status
from delaytasks.model.policies import MAX_LIMIT
from delaytasks.model.task import CancelResult, DelayedTask, Page

if TYPE_CHECKING:
    from delaytasks.client import DelayTasks
    from delaytasks.model.policies import Policy
    from delaytasks.recurring.definition import RecurringSchedule

# -- Kinds of values ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kind:
    """The values of a parameter: how a person types one, and how a JSON document has it."""

    #: A word for the help.
    name: str
    #: The JSON Schema of a value, with its bounds.
    schema: Mapping[str, Any] = field(default_factory=dict)
    #: Converts what a person typed. The second argument is the name of the parameter, for errors.
    parse: Callable[..., Any] = lambda typed, _: typed
    #: Converts a value of a JSON document that matches the schema.
    read: Callable[[Any, str], Any] = lambda value, _: value
    #: Whether `parse` takes the time zone of an instant as its third argument.
    has_zone: bool = False


def text(longest: int, pattern: str | None = None) -> Kind:
    schema: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": longest}
    return Kind("text", schema if pattern is None else {**schema, "pattern": pattern})


def printable(longest: int) -> Kind:
    """A name: printable characters, without a blank at its ends."""
    return text(longest, r"^[^\x00-\x20\x7f-\xa0]([^\x00-\x1f\x7f-\xa0]*[^\x00-\x20\x7f-\xa0])?$")


def integer(least: int, most: int) -> Kind:
    def parse(typed: str, argument: str) -> int:
        is_number = typed.isascii() and typed.isdecimal() and len(typed) < 20
        return check_integer(int(typed) if is_number else typed, argument, least, most)

    return Kind("integer", {"type": "integer", "minimum": least, "maximum": most}, parse)


def one_of(*words: str) -> Kind:
    return Kind("word", {"enum": list(words)})


def _parse_json(typed: str, argument: str) -> Any:
    try:
        return json.loads(typed)
    except (ValueError, RecursionError) as error:
        remedy = "a string needs quotes, as in '\"text\"'"
        problem = f"the {argument} is not JSON ({error}); {remedy}"
        raise InvalidInputError(problem, argument) from None


def _parse_end(typed: str, argument: str, zone: tzinfo | None = None) -> datetime | timedelta:
    """Return a duration from now, or an instant."""
    if not has_unit(typed):
        rule = "write 2h (from now) or 2030-01-31T18:00:00Z"
        raise InvalidInputError(f"{typed!r:.40} has no unit; {rule}", argument)
    try:
        return parse_duration(typed, argument)
    except InvalidInputError:
        return parse_instant(typed, argument, zone)


#: Removes a limit.
NO_LIMIT = "none"


def _parse_limit(typed: str, argument: str) -> Any:
    return typed if typed == NO_LIMIT else integer(0, MAX_LIMIT).parse(typed, argument)


def parse_pair(typed: str, argument: str) -> tuple[str, str]:
    name, sign, value = typed.partition("=")
    if not sign:
        raise InvalidInputError(f"{typed!r:.40} is no pair: write it as name=value", argument)
    return name, value


ANY_VALUE = Kind("JSON", parse=_parse_json)
FLAG = Kind("flag", {"type": "boolean"}, lambda typed, _: typed in ("1", "on", "true"))
TASK_ID = Kind("id", {"type": "string", "pattern": "^[1-9][0-9]{0,18}$"})
VERSION = integer(0, 2**63 - 1)
_INSTANT = {"type": "string", "format": "date-time", "maxLength": 40}
INSTANT = Kind("instant", _INSTANT, parse_instant, parse_instant, has_zone=True)
_UNIT = "( ?(w|d|h|ms|m|s))"
_DURATION = {
    "type": ["number", "string"],
    "minimum": 0,
    "maximum": MAX_DELAY_S,
    "maxLength": 100,
    "pattern": rf"^[0-9]+(\.[0-9]+)?({_UNIT}( ?[0-9]+(\.[0-9]+)?{_UNIT})*)?$",
}
DURATION = Kind("duration", _DURATION, parse_duration)
SHIFT = Kind("duration", parse=check_shift)
END = Kind("time", parse=_parse_end, has_zone=True)
LIMIT = Kind("number", parse=_parse_limit)
_RETRIES = {"type": ["string", "integer"], "minimum": 0, "minLength": 1, "maxLength": 1000}
RETRIES = Kind("delays", _RETRIES)
CURSOR = text(200, "^[A-Za-z0-9_-]+=*$")
#: A JSON document has an object, and a person types each pair.
_PAIRS = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": MAX_VALUE_LENGTH},
    "propertyNames": {"pattern": "^[A-Za-z0-9_.-]{1,64}$"},
    "maxProperties": MAX_PAIRS,
}
PAIRS = Kind("name=value", _PAIRS, parse_pair)
_PAIR = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}=", "maxLength": 600}
PAIR = Kind("name=value", _PAIR, parse_pair, parse_pair)
HEADERS = Kind("headers", {"type": "object", "additionalProperties": {"type": "string"}})
WORD = text(1000)


# -- Parameters -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Parameter:
    """An argument of an operation, which has the name of that of the public class."""

    name: str
    kind: Kind
    help: str
    #: Whether it has several values.
    is_many: bool = False
    is_required: bool = False
    #: The most values.
    most: int | None = None

    @property
    def label(self) -> str:
        """The words before its field in a form."""
        return self.name.replace("_", " ").capitalize()

    @property
    def choices(self) -> list[str]:
        """The words of which a value is one; empty if it may be another."""
        return list(self.kind.schema.get("enum", ()))

    def parse(self, typed: str, zone: tzinfo | None = None) -> Any:
        """Convert what a person typed into a field; several values are on lines of their own.

        `zone` is the time zone of instants without one.
        """
        more = (zone,) if self.kind.has_zone else ()
        if not self.is_many and self.kind is not PAIRS:
            return self.kind.parse(typed.strip(), self.name, *more)
        lines = filter(None, map(str.strip, typed.splitlines()))
        values = [self.kind.parse(line, self.name, *more) for line in lines]
        return dict(values) if self.kind in (PAIR, PAIRS) else values

    @property
    def schema(self) -> dict[str, Any]:
        schema = dict(self.kind.schema)
        if self.is_many:
            schema = {"type": "array", "items": schema}
            if self.is_required:
                schema["minItems"] = 1
            if self.most is not None:
                schema["maxItems"] = self.most
        return {**schema, "description": self.help}

    def read(self, value: Any) -> Any:
        """Convert a value of a JSON document that matches the schema."""
        if not self.is_many:
            return self.kind.read(value, self.name)
        values = [self.kind.read(each, self.name) for each in value]
        return dict(values) if self.kind is PAIR else values


TAG = Parameter("tag", printable(TAG_LENGTH), "The tag, which names the processor.")
KEY = Parameter(
    "key", printable(KEY_LENGTH), "The name of the task within its tag, until it has ended."
)
_QUEUE = text(QUEUE_LENGTH, "^[A-Za-z0-9_.-]+$")
QUEUE = Parameter("queue", _QUEUE, "The queue [that of the processor].")
DELAY = Parameter("delay", DURATION, "From now: 90 (seconds), 30m, 1h30m, 2d, 500ms.")
AT = Parameter("at", INSTANT, "As 2030-01-31T18:00:00Z. A time in the past means now.")
IF_VERSION = Parameter("version", VERSION, "Only if the task still has this version.")
RUNNING = Parameter("running", FLAG, "Ask tasks that run to stop.")
ACTOR = Parameter("actor", printable(ACTOR_LENGTH), "Who does it [you on this host].")
ENTRY = Parameter("entry", text(20), "Many: cancelled by this operation of the `log`.")
BODY = Parameter("body", ANY_VALUE, "The argument of the processor.")
BODY_VERSION = Parameter(
    "body_version", integer(FIRST_VERSION, MAX_VERSION), "The version of its body. [1]"
)
LIMIT_KEY = Parameter(
    "limit_key", printable(LIMIT_KEY_LENGTH), "The key for limits that each key has."
)
META = Parameter("meta", PAIRS, "Pairs of its meta.")
RETRY_DELAYS = Parameter("retries", RETRIES, 'Its own retry schedule, such as "15s 3m 10m".')
PRIORITY = Parameter("priority", integer(0, MAX_PRIORITY), "0 to 9, higher first. [0]")
MAX_LATE = Parameter("max_late", DURATION, "A task that would start later is cancelled instead.")
JITTER = Parameter("jitter", DURATION, "Due up to this time later, to spread many.")
ON_CONFLICT = Parameter(
    "on_conflict",
    one_of("reject", "keep", "replace", "take"),
    "While another task has the key: refuse, keep it, give it this body and time, run both. "
    "[reject]",
)
#: The options of each task of a schedule, and those of all new tasks.
OF_EACH = (QUEUE, PRIORITY, RETRY_DELAYS, MAX_LATE, LIMIT_KEY, META)
NEW_TASK = (DELAY, AT, KEY, ON_CONFLICT, *OF_EACH, JITTER)
#: The filters of `find`.
FILTERS = (
    replace(TAG, help="Of this tag."),
    Parameter("ids", TASK_ID, "Some ids.", is_many=True, most=MAX_IDS),
    replace(KEY, help="With this key. A finished task keeps its key."),
    Parameter("key_prefix", printable(KEY_LENGTH), "With a key that begins so."),
    replace(QUEUE, help="Of this queue."),
    Parameter("status", one_of(*(s.name for s in Status)), "Of this status. Repeatable.", True),
    Parameter("meta", PAIR, "With this pair. Repeatable.", is_many=True),
    Parameter(
        "error",
        text(MAX_ERROR_PATTERN),
        "Whose last error matches; * stands for any text, as '*timeout*'.",
    ),
    Parameter("since", INSTANT, "Due at or after."),
    Parameter("until", INSTANT, "Due before."),
    Parameter("created_since", INSTANT, "Scheduled at or after."),
    Parameter("created_until", INSTANT, "Scheduled before."),
    Parameter("updated_until", INSTANT, "Not moved since."),
)


# -- Operations -----------------------------------------------------------------------------------


#: Reads all tasks, schedules new ones, or changes all.
Who = Literal["read", "schedule", "operate"]


@dataclass(frozen=True)
class Operation:
    """One line of the table."""

    name: str
    help: str
    who: Who
    parameters: tuple[Parameter, ...]
    #: Is called with a `DelayTasks` and the given values by name.
    call: Callable[..., Any]
    #: The method and the path of each request of the HTTP API, by its name.
    routes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    #: The schema of the responses.
    reply: str = "Task"
    #: What it has done to a task or a schedule, as a participle.
    done: str = ""
    #: The method of `delays.bulk` that does it with all tasks that match filters, and the
    #: parameters that only this method has.
    bulk: Callable[..., Any] | None = None
    only_bulk: tuple[Parameter, ...] = ()

    def parse(self, typed: Mapping[str, str], zone: tzinfo | None = None) -> dict[str, Any]:
        """Convert the fields of a form to arguments; an empty field is not given."""
        return {
            each.name: each.parse(typed[each.name], zone)
            for each in (*self.parameters, *self.only_bulk)
            if typed.get(each.name, "").strip()
        }

    @property
    def fields(self) -> list[Parameter]:
        """The parameters that a form shows.

        The others are the name of the viewer, what belongs to one task, and a log entry.
        """
        hidden = (ACTOR, IF_VERSION, RUNNING, ENTRY)
        return [each for each in (*self.parameters, *self.only_bulk) if each not in hidden]

    @property
    def is_command(self) -> bool:
        """Whether it is a command. The help of a command has an example."""
        return f"\ndelaytasks {self.name}" in self.help


OPERATIONS: dict[str, Operation] = {}
F = TypeVar("F", bound=Callable[..., Any])


def operation(name: str, who: Who, *parameters: Parameter, **details: Any) -> Callable[[F], F]:
    """Add a function to the table. `details` are further fields of `Operation`."""

    def add(call: F) -> F:
        help = cleandoc(call.__doc__ or "")
        OPERATIONS[name] = Operation(name, help, who, parameters, call, **details)
        return call

    return add


# -- New tasks


@operation(
    "schedule",
    "schedule",
    replace(TAG, is_required=True),
    BODY,
    BODY_VERSION,
    *NEW_TASK,
    Parameter("id", TASK_ID, "Your own id; scheduling again with it is harmless."),
    routes={"scheduleTask": ("POST", "/v1/tasks")},
    done="scheduled",
)
def schedule(delays: DelayTasks, tag: str, body: Any = None, **options: Any) -> DelayedTask:
    """Schedule a task of TAG. BODY is JSON, or - for stdin; without it the body is null.

    \b
    delaytasks schedule order.close '{"order": 7}' --delay 30m
    delaytasks schedule report.send - --at 2030-01-31T18:00:00Z --key january
    """
    return delays.schedule_delay(tag, body, **options)


@operation(
    "callback",
    "schedule",
    Parameter("url", text(2000), "The URL that receives a POST of the body.", is_required=True),
    replace(BODY, help="The body of the POST."),
    Parameter("headers", HEADERS, "Additional HTTP headers."),
    *NEW_TASK,
    routes={"scheduleCallback": ("POST", "/v1/callbacks")},
)
def callback(delays: DelayTasks, url: str, body: Any = None, **options: Any) -> DelayedTask:
    """Schedule a POST to a URL."""
    return delays.callbacks.post(url, body, **options)


# -- One task, or many


@operation(
    "list",
    "read",
    *FILTERS,
    Parameter("cursor", CURSOR, "Continue after the page that has this cursor."),
    Parameter("limit", integer(1, PAGE_MAX), "The most tasks, 1 to 1000. [100]"),
    Parameter("newest_first", FLAG, "Begin with the latest due time."),
    routes={"findTasks": ("GET", "/v1/tasks")},
    reply="TaskPage",
)
def find(delays: DelayTasks, **filters: Any) -> Page:
    """Find tasks, in the order of their due times."""
    return delays.find(**filters)


@operation("show", "read", routes={"getTask": ("GET", "/v1/tasks/{id}")})
def show(delays: DelayTasks, task: int) -> DelayedTask:
    """Read a task."""
    return delays.get(task)


@operation(
    "cancel",
    "operate",
    IF_VERSION,
    RUNNING,
    routes={
        "cancelTask": ("POST", "/v1/tasks/{id}/cancel"),
        "cancelKey": ("POST", "/v1/keys/cancel"),
    },
    reply="CancelResult",
    done="cancelled",
    bulk=lambda delays, **options: delays.bulk.cancel(**options),
)
def cancel(delays: DelayTasks, **options: Any) -> CancelResult:
    """Cancel waiting tasks: by their ids, by tag and key, or many that match filters.

    \b
    delaytasks cancel 2305843009213693952 2305843009213693953
    delaytasks cancel --tag order.close --key order-7
    delaytasks cancel --tag newsletter.send --key 'eu-*' --dry-run

    It is no error if a named task was cancelled before. A task that runs, has ended or does not
    exist is reported, and the exit code is 1.
    """
    return delays.cancel(**options)


@operation(
    "reschedule",
    "operate",
    DELAY,
    AT,
    IF_VERSION,
    routes={
        "rescheduleTask": ("POST", "/v1/tasks/{id}/reschedule"),
        "rescheduleKey": ("POST", "/v1/keys/reschedule"),
    },
    done="rescheduled",
    bulk=lambda delays, **options: delays.bulk.reschedule(**options),
    only_bulk=(
        Parameter("by", SHIFT, "Many: this much later, or with a minus sign earlier."),
        replace(JITTER, help="Many: up to this time later, so that a peak becomes flat."),
    ),
)
def reschedule(delays: DelayTasks, **options: Any) -> DelayedTask:
    """Give waiting tasks another time: by their ids, by tag and key, or many that match filters.

    \b
    delaytasks reschedule 2305843009213693952 --delay 2h
    delaytasks reschedule --queue reports --due ..2030-01-31T18:00:00Z --by 2h --dry-run
    delaytasks reschedule --tag mail.send --jitter 10m \\
        --due 2030-01-31T09:00:00Z..2030-01-31T09:01:00Z

    --jitter distributes the tasks uniformly. Overdue tasks are distributed from now on.
    """
    return delays.reschedule(**options)


@operation(
    "rerun",
    "operate",
    replace(DELAY, help="Run after this time [now]."),
    IF_VERSION,
    routes={"rerunTask": ("POST", "/v1/tasks/{id}/rerun")},
    done="rerun",
    bulk=lambda delays, **options: delays.bulk.rerun(**options),
    only_bulk=(ENTRY,),
)
def rerun(delays: DelayTasks, **options: Any) -> DelayedTask:
    """Run FAILED or CANCELLED tasks again: by their ids, or many FAILED ones that match filters.

    \b
    delaytasks rerun 2305843009213693952
    delaytasks rerun --tag pay.notify --due 2030-01-31T00:00:00Z.. --dry-run

    Filters match CANCELLED tasks only with --status CANCELLED. With --entry, tasks that have not
    moved since their cancel run at their own due times, unless --delay is given.
    """
    return delays.rerun(**options)


@operation("log", "read", Parameter("limit", integer(1, PAGE_MAX), "1 to 1000. [20]"))
def log(delays: DelayTasks, limit: int = 20) -> list[Any]:
    """List the operations on many tasks, the newest first: the actor, the filter and the counts.

    \b
    delaytasks log --limit 5

    If the process of an operation died, its state stays `running`, and its time of `seen` stops.
    """
    return delays.bulk.log(limit=limit)


# -- Pauses and limits


_TARGET = (replace(TAG, help="The tag, in all queues."), replace(QUEUE, help="For all tags."))
_PAUSED = (
    *_TARGET,
    Parameter("recurring", KEY.kind, "The recurring schedule, instead of a tag or a queue."),
)


@operation(
    "pause",
    "operate",
    *_PAUSED,
    Parameter("until", END, "The end, as 2h or 2030-01-31T18:00:00Z."),
    ACTOR,
    done="paused",
)
def pause(
    delays: DelayTasks, recurring: str | None = None, actor: str | None = None, **target: Any
) -> Policy | RecurringSchedule:
    """Pause a tag, a queue or a recurring schedule: no more of its tasks begin.

    \b
    delaytasks pause --tag mail.send
    delaytasks pause --tag partner.call --until 2h
    delaytasks pause --queue reports --actor "ann, since the printer burns"
    delaytasks pause --recurring nightly

    Running tasks may finish. The waiting tasks of a tag or a queue become HELD, step by step with
    each sweep. Those of a recurring schedule are cancelled if their occurrences are later.
    """
    if recurring is not None:
        _exclude("recurring", target)
        return delays.recurring.pause(recurring, actor=actor)
    return _counted(delays, delays.policies.pause(**target, actor=actor))


@operation("resume", "operate", *_PAUSED, ACTOR, done="resumed")
def resume(
    delays: DelayTasks, recurring: str | None = None, actor: str | None = None, **target: Any
) -> Policy | RecurringSchedule:
    """Resume a tag, a queue or a recurring schedule.

    \b
    delaytasks resume --tag mail.send
    delaytasks resume --recurring nightly

    Held tasks wait again, in the order of their due times. A recurring schedule continues with its
    next occurrence.
    """
    if recurring is not None:
        _exclude("recurring", target)
        return delays.recurring.resume(recurring, actor=actor)
    return _counted(delays, delays.policies.resume(**target, actor=actor))


@operation(
    "limit",
    "operate",
    *_TARGET,
    Parameter("concurrency", LIMIT, "The most running tasks, on all workers."),
    Parameter("concurrency_per_key", LIMIT, "The most running tasks of a limit key."),
    Parameter("rate", WORD, "The most tasks that begin in a period: 100/s, 30/m, 1000/1h30m."),
    Parameter("remove", FLAG, "Remove all limits, and the pause."),
    ACTOR,
    done="changed",
)
def limit(
    delays: DelayTasks,
    tag: str | None = None,
    queue: str | None = None,
    remove: bool = False,
    actor: str | None = None,
    **limits: Any,
) -> Policy | list[Policy]:
    """Limit a tag, or show what is limited or paused, with its held and running tasks.

    \b
    delaytasks limit
    delaytasks limit --tag mail.send --concurrency 10 --rate 100/s
    delaytasks limit --tag mail.send --rate none
    delaytasks limit --tag mail.send --remove

    Limits that are not named stay; "none" removes a limit.
    """
    if remove:
        _exclude("remove", limits)
        return _counted(delays, delays.policies.remove(tag=tag, queue=queue, actor=actor))
    if not limits:
        return delays.policies.list(tag=tag, queue=queue)
    limits = {name: None if value == NO_LIMIT else value for name, value in limits.items()}
    return _counted(delays, delays.policies.set(tag=tag, queue=queue, actor=actor, **limits))


def _exclude(name: str, others: Mapping[str, Any]) -> None:
    if others:
        raise InvalidInputError(f"{name} cannot be combined with {', '.join(others)}", name)


def _counted(delays: DelayTasks, changed: Policy) -> Policy:
    """Return the policy as it is now, with the number of tasks that it holds."""
    known = delays.policies.list(**{changed.kind: changed.name})
    return known[0] if known else changed


# -- Recurring schedules


_NAME = Parameter("name", KEY.kind, "The name of the schedule.", is_required=True)


@operation(
    "recurring set",
    "operate",
    _NAME,
    replace(TAG, is_required=True),
    BODY,
    Parameter("cron", WORD, 'As "0 9 * * mon-fri".'),
    Parameter("every", WORD, "As 30s, 5m or 1d."),
    Parameter("tz", WORD, "The time zone of the cron expression, as Europe/Berlin."),
    Parameter("start", INSTANT, "The first occurrence, as 2030-01-31T18:00:00Z."),
    JITTER,
    Parameter("missed", one_of("latest", "skip", "all"), "Which missed occurrences run. [latest]"),
    Parameter("overlap", one_of("allow", "skip"), "While the last task has not ended. [allow]"),
    *OF_EACH,
    BODY_VERSION,
    ACTOR,
    done="stored",
)
def set_schedule(delays: DelayTasks, **options: Any) -> RecurringSchedule:
    """Store a schedule, or replace the one of this name. The body is JSON; - reads it from stdin.

    \b
    delaytasks recurring set nightly report.send --cron "0 2 * * *" --tz Europe/Berlin
    delaytasks recurring set feeds feed.read '{"feed": 7}' --every 5m --overlap skip
    """
    return delays.recurring.set(**options)


@operation("recurring run", "operate", _NAME, done="scheduled")
def run_schedule(delays: DelayTasks, name: str) -> DelayedTask:
    """Make one task of a schedule now. Its occurrences stay as they are.

    \b
    delaytasks recurring run nightly
    """
    return delays.recurring.schedule_now(name)


@operation("recurring remove", "operate", _NAME, ACTOR, done="removed")
def remove_schedule(delays: DelayTasks, name: str, actor: str | None = None) -> RecurringSchedule:
    """Delete a schedule, and cancel its tasks that wait for later occurrences.

    \b
    delaytasks recurring remove nightly
    """
    return delays.recurring.remove(name, actor=actor)


# -- Results --------------------------------------------------------------------------------------


def document_of(result: Any) -> Any:
    """Return what an operation has returned as a JSON document."""
    match result:
        case list():
            return [document_of(each) for each in result]
        case Page():
            return {"tasks": [task.as_json() for task in result], "cursor": result.cursor}
        case CancelResult():
            return {
                "is_cancelled": result.is_cancelled,
                "is_requested": result.is_requested,
                "reason": result.reason,
                "id": None if result.id is None else str(result.id),
                "status": None if result.status is None else result.status.name,
            }
    return result.as_json()
