"""The pages of policies and of recurring schedules: what is paused, limited and planned."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from flask import abort, render_template, request

from delaytasks.console.requests import action, now, number_of, page, state, viewer
from delaytasks.console.viewers import Role
from delaytasks.model.errors import DelayTaskError, InvalidInputError, TaskNotFoundError
from delaytasks.model.policies import Policy
from delaytasks.model.task import DelayedTask
from delaytasks.recurring.definition import (
    ANY_START,
    EVERY,
    FIELDS,
    RecurringOptions,
    RecurringSchedule,
)

# -- policies -------------------------------------------------------------------------------------


LIMITS = ("concurrency", "concurrency_per_key", "rate")


@page("/policies")
def policies() -> str:
    found, tag = state().snapshot(), request.args.get("tag", "").strip()
    return render_template(
        "lists.html",
        page="policies",
        rows=found.policies,
        s=found,
        now=found.now,
        edited=_limited(tag),
    )


def _limited(tag: str) -> Policy | None:
    """Return the policy of a tag, as it is stored now, if it has limits."""
    stored = state().delays.policies.list(tag=tag) if tag else []
    return next((policy for policy in stored if policy.has_limits), None)


def _of_policy() -> dict[str, Any]:
    """Return the tag or queue that the form names, and the actor, as arguments."""
    kind = request.form.get("kind")
    if kind not in ("tag", "queue"):
        abort(400)
    return {kind: request.form.get("name", "").strip(), "actor": viewer().name}


@action("/policies/pause", Role.OPERATE)
def pause() -> str:
    until = request.form.get("until", "").strip() or None
    done = state().delays.policies.pause(**_of_policy(), until=until)
    return f"The {done.kind} {done.name} is paused. Tasks that run will finish."


@action("/policies/resume", Role.OPERATE)
def resume() -> str:
    done = state().delays.policies.resume(**_of_policy())
    return f"The {done.kind} {done.name} continues."


@action("/policies/remove", Role.ADMIN)
def remove_policy() -> str:
    done = state().delays.policies.remove(**_of_policy())
    return f"The pause and the limits of the {done.kind} {done.name} are removed."


@action("/policies/limits", Role.ADMIN)
def set_limits() -> str:
    of, form = _of_policy(), request.form
    if "is_change" not in form and _limited(of.get("tag", "")) is not None:
        raise InvalidInputError(
            f"the tag {of['tag']} has limits already: change them in the list", "tag"
        )
    # Limits without a field stay.
    limits = {name: _limit(name, form[name].strip()) for name in LIMITS if name in form}
    policy = state().delays.policies.set(**of, **limits)
    return f"The limits of the {policy.kind} {policy.name} are changed."


def _limit(name: str, text: str) -> Any:
    """Return the limit that a field says; an empty field means no limit."""
    if not text or name == "rate":
        return text or None
    number = number_of(text)
    if number is None:
        raise InvalidInputError(f"{name} is a number, not {text!r:.40}", name)
    return number


# -- recurring schedules --------------------------------------------------------------------------


#: The schedules of a page, and the occurrences that are shown of each.
SCHEDULES_PER_PAGE, NEXT = 100, 3
#: The fields of the form, apart from the name and the body.
FORM_FIELDS = ("tag", "cron", "every", "tz", "queue", "missed", "overlap")


@page("/recurring")
def recurring() -> str:
    schedules, at = state().delays.recurring, now()
    after = request.args.get("after") or None
    found = schedules.list(after=after, limit=SCHEDULES_PER_PAGE)
    edited = _stored(request.args.get("name", "").strip())
    return render_template(
        "lists.html",
        page="recurring",
        rows=[(each, _next(each, at)) for each in found],
        following=found[-1].name if len(found) == SCHEDULES_PER_PAGE else None,
        edited=edited,
        values={} if edited is None else _values_of(edited),
        body="" if edited is None else _body_text(edited),
        now=at,
    )


def _next(schedule: RecurringSchedule, at: datetime) -> list[datetime]:
    try:
        return schedule.next(NEXT, at)
    except DelayTaskError:  # another program has written the timing
        return []


def _name() -> str:
    return request.form.get("name", "").strip() or abort(400)


@action("/recurring/pause", Role.OPERATE)
def pause_recurring() -> str:
    state().delays.recurring.pause(_name(), actor=viewer().name)
    return f"The schedule {_name()} is paused."


@action("/recurring/resume", Role.OPERATE)
def resume_recurring() -> str:
    state().delays.recurring.resume(_name(), actor=viewer().name)
    return f"The schedule {_name()} continues with its next occurrence."


@action("/recurring/run", Role.OPERATE)
def run_recurring() -> str:
    task = state().delays.recurring.schedule_now(_name())
    return f"The task {task.id} of the schedule {_name()} is due now."


@action("/recurring/remove", Role.ADMIN)
def remove_recurring() -> str:
    state().delays.recurring.remove(_name(), actor=viewer().name)
    return f"The schedule {_name()} is removed."


@action("/recurring", Role.ADMIN)
def set_recurring() -> str:
    """Add a schedule, or change the one of this name, which keeps the options without a field."""
    name, form, schedules = _name(), request.form, state().delays.recurring
    given = {field: form[field].strip() for field in FORM_FIELDS if field in form}
    text, known = form.get("body", "").strip(), _stored(name)
    values: dict[str, Any] = {}
    if known is not None:
        if "is_change" not in form:
            raise InvalidInputError(
                f"there is a schedule {name} already: change it in the list", "name"
            )
        body = _body(text) if text else known.body
        values = {**_kept_options(known, given.get("tag", known.tag), body), **_values_of(known)}
    else:
        body = _body(text) if text else None
    options = {field: v for field, v in {**values, **given}.items() if v not in (None, "")}
    schedules.set(name, options.pop("tag", ""), body, actor=viewer().name, **options)
    return f"The schedule {name} is stored."


def _stored(name: str) -> RecurringSchedule | None:
    try:
        return state().delays.recurring.get(name) if name else None
    except TaskNotFoundError:
        return None


def _values_of(schedule: RecurringSchedule) -> dict[str, Any]:
    """Return what the fields of the form show of a stored schedule."""
    same = ("tag", "tz", "queue", "missed", "overlap")
    timing = " ".join(schedule.timing.split())
    interval = timing.removeprefix(f"{EVERY} ")
    option = {"cron": timing} if interval == timing else {"every": interval}
    return option | {field: getattr(schedule, field) for field in same}


def _kept_options(schedule: RecurringSchedule, tag: str, body: Any) -> dict[str, Any]:
    """Return the options of a stored schedule except its timing, for a form that changes some.

    The body's version is kept if the form changes neither the tag nor the body.
    """
    # A task reads these options from the same headers.
    task = DelayedTask(0, schedule.tag, "", ANY_START, headers_json=schedule.headers_json)
    is_same_body = tag == schedule.tag and body == schedule.body
    alike = RecurringOptions.__annotations__.keys() & set(FIELDS)
    return {name: getattr(schedule, name) for name in alike} | {
        "start": schedule.start_at,
        "jitter": schedule.jitter_s,
        "retries": task.retry_schedule,
        "max_late": task.max_late_s,
        "meta": schedule.meta or None,
        "body_version": task.body_version if is_same_body else None,
    }


def _body_text(schedule: RecurringSchedule) -> str:
    """Return the body for the form, or no text if this process cannot decrypt or decode it."""
    try:
        return json.dumps(schedule.body, ensure_ascii=False, indent=2)
    except (ValueError, RecursionError):
        return ""


def _body(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is not JSON: {error}", "body") from None
