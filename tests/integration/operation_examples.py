"""Examples of the operations: deployments before a call, calls, and what each has changed.

`test_faces.py` makes the calls on each face, and `django_admin_tests.py` in Django's admin.
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from delaytasks import DelayTasks, Status
from delaytasks.db.types import db_now_plus
from delaytasks.model.clock import UTC
from delaytasks.operate.operations import OPERATIONS, Parameter
from delaytasks.runtime import runtime_of
from tests.world import status_columns
from tests.world.recording import set_columns

#: The actor on each face that names one.
WHO = "maria"
BIG = 2**53 + 1

# -- What there is before a call, and what a call has changed -------------------------------------


def arrange(delays: DelayTasks) -> None:
    """Make tasks in several states, policies, schedules, and the log entry of a cancellation."""
    far = datetime(2031, 1, 1, tzinfo=UTC)
    states = {"failed": Status.FAILED, "cancelled": Status.CANCELLED, "runs": Status.RUNNING}
    before, june = datetime(2022, 1, 1, tzinfo=UTC), datetime(2031, 6, 1, tzinfo=UTC)
    delays.schedule_delay("mail", {}, at=june, key="waits", id=11, meta={"tenant": "acme"})
    for id, key in enumerate(states, 12):
        delays.schedule_delay("mail", {}, at=far, key=key, id=id, queue="letters")
    delays.schedule_delay("other", {}, 600, key="other", id=15)
    delays.schedule_delay("undo", {}, at=far, key="undone", id=16)
    store = runtime_of(delays).store
    for key, status in states.items():
        set_columns(store, "tasks", {"task_key": key}, **status_columns(status))
    set_columns(store, "tasks", {"id": 12}, error_stack="TimeoutError: no answer")
    # A shift leaves out tasks that have just moved.
    set_columns(store, "tasks", create_time=db_now_plus(-60), update_time=db_now_plus(-60))
    set_columns(store, "tasks", {"id": 15}, create_time=before, update_time=before)
    delays.bulk.cancel(tag="undo", actor="ann")
    delays.policies.pause(tag="paused", actor="ann")
    delays.policies.pause(queue="halted", actor="ann")
    delays.policies.set(tag="limited", concurrency=5, rate="5/s", actor="ann")
    for name in ("nightly", "stopped"):
        delays.recurring.set(name, "mail", {}, cron="0 2 * * *", queue="letters", actor="ann")
    delays.recurring.pause("stopped", actor="ann")


State = dict[str, dict[str, Any]]


def state_of(delays: DelayTasks) -> State:
    """Return the fields that operations change, of each task, policy and schedule."""

    def fields(found: Any, names: str) -> dict[str, Any]:
        headers = json.loads(getattr(found, "headers_json", None) or "{}")
        options = {name: headers.get(name) for name in ("max_late_s", "body_version")}
        options["retry"] = headers.get("retry", {}).get("retry_delays_s")
        return {name: getattr(found, name) for name in names.split()} | options

    of_both = "tag queue priority limit_key meta body"
    state: State = {}
    for task in delays.find(limit=1000):
        is_asked = task.status is Status.RUNNING and task.cancel_request is not None
        changed = {"status": task.status.name, "due": task.due, "is_asked_to_stop": is_asked}
        name = (task.key or "").partition("@")[0]
        state[f"task {name}"] = fields(task, of_both) | changed
    for policy in delays.policies.list():
        names = "is_paused paused_until concurrency concurrency_per_key rate_text updated_by"
        state[f"{policy.kind} {policy.name}"] = fields(policy, names)
    for each in delays.recurring.list():
        names = f"{of_both} timing tz start_at jitter_s missed overlap is_paused updated_by"
        state[f"schedule {each.name}"] = fields(each, names)
    return {name: {k: v for k, v in known.items() if v} for name, known in state.items()}


def changes(before: State, after: State) -> dict[str, Any]:
    """Return the changed fields of each object; None for an object that is gone."""
    found: dict[str, Any] = {}
    for name in {**before, **after}:
        old, new = before.get(name, {}), after.get(name)
        if old != new:
            both = {**old, **(new or {})}
            fields = [k for k in both if new and old.get(k) != new.get(k)]
            found[name] = new and {k: shown(new.get(k)) for k in fields}
    return found


def shown(value: Any) -> Any:
    """Return an instant as a text; a near one as its distance in minutes."""
    if not isinstance(value, datetime):
        return value
    left = value - datetime.now(UTC)
    if left > timedelta(days=30):
        return f"{value:%Y-%m-%dT%H:%M}"
    return f"in {round(left.total_seconds() / 60)} minutes"


# -- Examples -------------------------------------------------------------------------------------

#: A valid value of each parameter, as a person types it.
VALUES = {
    "tag": "mail", "key": "new", "body": f'{{"n": {BIG}}}', "body_version": "2", "delay": "1h30m",
    "at": "2031-02-01T18:00:00Z", "queue": "slow", "priority": "3", "retries": "15s 3m",
    "max_late": "1h", "limit_key": "acme", "meta": "tenant=acme\nplan=pro", "jitter": "1ms",
    "on_conflict": "replace", "url": "https://1.1.1.1/paid", "headers": '{"X-Shop": "acme"}',
    "limit": "1", "newest_first": "1", "running": "1", "version": "0", "by": "-2h",
    "until": "2031-02-01T18:00:00Z", "recurring": "nightly", "rate": "30/m",
    "concurrency": "3", "concurrency_per_key": "2", "remove": "1", "name": "nightly",
    "cron": "0 9 * * mon-fri", "every": "5m", "tz": "Europe/Berlin", "missed": "skip",
    "overlap": "skip", "start": "2031-01-31T18:00:00Z", "entry": "of the deployment",
}  # fmt: skip
#: Words of messages that do not have the name of their parameter.
SAYS = {"recurring": "name", "tz": "time_zone", "retries": "retr"}
#: An invalid value of each kind, and a word of the message; by default the parameter's name.
WRONG: dict[str, tuple[str, str]] = {
    "text": ("x" * 2100, ""), "integer": ("many", ""), "word": ("nothing", ""), "JSON": ("\0", ""),
    "id": ("x", ""), "instant": ("soon", "instant"), "duration": ("soon", ""), "number": ("x", ""),
    "time": ("soon", "instant"), "delays": ("soon", ""), "name=value": ("x", "pair"),
    "headers": ("x", ""),
}  # fmt: skip


class Example(NamedTuple):
    """A valid call of an operation, and its whole effect."""

    operation: str
    #: The task, as `id:11` or `key:waits`; many tasks, as `many:tag=mail`; or none.
    target: str
    #: The given parameters, with a value if it is another one than in `VALUES`.
    parameters: str
    effect: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.operation} {self.target} {self.parameters}"[:60]

    @property
    def kind(self) -> str:
        return self.target.partition(":")[0]

    @property
    def call(self) -> tuple[str, str]:
        return self.operation, self.kind

    @property
    def which(self) -> str:
        return self.target.partition(":")[2]

    @property
    def action(self) -> str:
        """What a log entry calls it."""
        return f"{self.operation}_task" if self.kind == "id" else self.operation

    @property
    def filters(self) -> dict[str, str]:
        return typed_of(self.which) if self.kind == "many" else {}

    @property
    def typed(self) -> dict[str, str]:
        return typed_of(self.parameters)


def typed_of(words: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in words.split())
    return {name: value or VALUES[name] for name, _, value in pairs}


def at(minute: str) -> dict[str, str]:
    return {"due": minute}


OPTIONS = "queue priority retries max_late limit_key meta"
META, BODY = {"plan": "pro", "tenant": "acme"}, {"n": BIG}
#: What a task or a schedule has of these options.
OF_EACH = {"queue": "slow", "priority": 3, "limit_key": "acme", "meta": META, "max_late_s": 3600}
OF_EACH |= {"retry": [15, 180]}
NEW = {**OF_EACH, "status": "NOT_COMPLETE", "due": "2031-02-01T18:00"}
PAID = {"url": VALUES["url"], "headers": {"X-Shop": "acme"}, "body": BODY}
HOURLY = {"tag": "mail", "body": BODY, "jitter_s": 0.001, "overlap": "skip", "missed": "skip"}
HOURLY |= {**OF_EACH, "body_version": 2, "updated_by": WHO}
ALLOWED = {"missed": "latest", "overlap": "allow", "updated_by": WHO}
CANCELLED, AGAIN = {"status": "CANCELLED"}, {"status": "NOT_COMPLETE"}
LATER, NOW, BEGUN = at("in 90 minutes"), at("in 0 minutes"), at("2031-02-01T18:00")
LIMITS = {"concurrency": 3, "concurrency_per_key": 2, "rate_text": "30/m", "updated_by": WHO}
PAUSED = {"is_paused": True, "updated_by": WHO}
UNTIL = {**PAUSED, "paused_until": "2031-02-01T18:00"}
UNLIMITED = {"rate_text": None, "updated_by": WHO}
EXAMPLES = [
    Example("schedule", "", f"tag key on_conflict body body_version at {OPTIONS}",
            {"task new": {**NEW, "tag": "mail", "body": BODY, "body_version": 2}}),
    Example("schedule", "", "tag key delay jitter",
            {"task new": {**AGAIN, **LATER, "tag": "mail", "queue": "letters"}}),
    Example("schedule", "", "tag key=waits body delay on_conflict",
            {"task waits": {**LATER, "body": BODY, "meta": None}}),
    Example("schedule", "", "tag key=waits delay on_conflict=keep", {}),
    Example("callback", "", f"url body headers key on_conflict at {OPTIONS}",
            {"task new": {**NEW, "tag": "delaytasks.callback", "body": PAID}}),
    Example("callback", "", "url key delay jitter",
            {"task new": {**AGAIN, **LATER, "tag": "delaytasks.callback", "queue": "default",
                          "body": {"url": VALUES["url"], "body": None, "headers": {}}}}),
    Example("list", "", "limit newest_first", {}),
    Example("show", "id:11", "", {}),
    Example("show", "key:waits", "", {}),
    Example("cancel", "id:11", "version", {"task waits": CANCELLED}),
    Example("cancel", "id:14", "running", {"task runs": {"is_asked_to_stop": True}}),
    Example("cancel", "key:waits", "", {"task waits": CANCELLED}),
    Example("cancel", "many:tag", "", {"task waits": CANCELLED}),
    Example("cancel", "many:meta=tenant=acme", "", {"task waits": CANCELLED}),
    Example("reschedule", "id:11", "at version", {"task waits": BEGUN}),
    Example("reschedule", "id:11", "delay", {"task waits": LATER}),
    Example("reschedule", "key:waits", "delay", {"task waits": LATER}),
    Example("reschedule", "many:tag", "by", {"task waits": at("2031-05-31T22:00")}),
    Example("reschedule", "many:tag", "jitter=10h", {"task waits": at("2031-06-01T03:06")}),
    Example("reschedule", "many:tag", "delay", {"task waits": LATER}),
    Example("reschedule", "many:tag=other", "at", {"task other": BEGUN}),
    Example("rerun", "id:12", "version", {"task failed": {**AGAIN, **NOW}}),
    Example("rerun", "id:13", "delay", {"task cancelled": {**AGAIN, **LATER}}),
    Example("rerun", "key:failed", "", {"task failed": {**AGAIN, **NOW}}),
    Example("rerun", "many:tag", "delay", {"task failed": {**AGAIN, **LATER}}),
    Example("rerun", "many:status=CANCELLED tag", "", {"task cancelled": {**AGAIN, **NOW}}),
    Example("rerun", "many:", "entry", {"task undone": AGAIN}),
    Example("log", "", "limit", {}),
    Example("pause", "", "tag", {"tag mail": PAUSED}),
    Example("pause", "", "queue until", {"queue slow": UNTIL}),
    Example("pause", "", "recurring", {"schedule nightly": {"is_paused": True}}),
    Example("resume", "", "tag=paused", {"tag paused": None}),
    Example("resume", "", "queue=halted", {"queue halted": None}),
    Example("resume", "", "recurring=stopped", {"schedule stopped": {"is_paused": None}}),
    Example("limit", "", "tag concurrency concurrency_per_key rate", {"tag mail": LIMITS}),
    Example("limit", "", "tag=limited rate=none", {"tag limited": UNLIMITED}),
    Example("limit", "", "tag=limited remove", {"tag limited": None}),
    Example("limit", "", "queue=halted remove", {"queue halted": None}),
    Example("recurring set", "", f"name=new tag body cron tz jitter missed overlap body_version "
            f"{OPTIONS}", {"schedule new": {**HOURLY, "timing": VALUES["cron"],
                                            "tz": "Europe/Berlin"}}),
    Example("recurring set", "", "name=often tag every start",
            {"schedule often": {**ALLOWED, "tag": "mail", "queue": "letters", "timing": "every 5m",
                                "tz": "UTC", "start_at": "2031-01-31T18:00"}}),
    Example("recurring run", "", "name",
            {"task nightly": {**AGAIN, **NOW, "tag": "mail", "queue": "letters"}}),
    Example("recurring remove", "", "name", {"schedule nightly": None}),
]  # fmt: skip
#: Calls that the state of a task or a missing name refuses, and the error.
REFUSED = [
    Example("schedule", "", "tag key=waits delay", {"error": "DuplicateTaskError"}),
    Example("show", "id:99", "", {"error": "TaskNotFoundError"}),
    Example("cancel", "id:11", "version=7", {"error": "StaleVersionError"}),
    Example("reschedule", "id:11", "delay version=7", {"error": "StaleVersionError"}),
    Example("reschedule", "id:12", "delay", {"error": "TaskStateError"}),
    Example("rerun", "id:11", "", {"error": "TaskStateError"}),
    Example("pause", "", "recurring=gone", {"error": "TaskNotFoundError"}),
    Example("recurring run", "", "name=gone", {"error": "TaskNotFoundError"}),
    Example("recurring remove", "", "name=gone", {"error": "TaskNotFoundError"}),
]
#: Each filter, and the keys of the tasks that it finds.
FILTERED = {
    "tag": ("mail", "waits failed cancelled runs"),
    "ids": ("11\n15", "waits other"),
    "key": ("waits", "waits"),
    "key_prefix": ("f", "failed"),
    "queue": ("letters", "waits failed cancelled runs"),
    "status": ("FAILED\nRUNNING", "failed runs"),
    "meta": ("tenant=acme", "waits"),
    "error": ("*timeout*", "failed"),
    "since": ("2031-05-01T00:00:00Z", "waits"),
    "until": ("2031-05-01T00:00:00Z", "failed cancelled runs other undone"),
    "created_since": ("2024-01-01T00:00:00Z", "waits failed cancelled runs undone"),
    "created_until": ("2024-01-01T00:00:00Z", "other"),
    "updated_until": ("2024-01-01T00:00:00Z", "other"),
}
#: The server gives an actor, a command an id, and a page a cursor.
WITHOUT_EXAMPLE = {"actor", "id", "cursor"}


def parameters_of(example: Example) -> dict[str, Parameter]:
    """Return the parameters of a call that changes one task, or many."""
    operation = OPERATIONS[example.operation]
    parameters = {each.name: each for each in operation.parameters}
    if example.kind == "many":
        parameters |= {each.name: each for each in operation.only_bulk}
        parameters = {n: each for n, each in parameters.items() if n not in ("version", "running")}
    return parameters
