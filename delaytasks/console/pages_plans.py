"""The pages of policies and of recurring schedules: what is paused, limited and planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

from flask import Flask, abort, render_template, request
from werkzeug.wrappers import Response

from delaytasks.console.requests import act, requires, state, viewer
from delaytasks.console.viewers import Role
from delaytasks.model.errors import DelayTaskError, InvalidInputError, TaskNotFoundError
from delaytasks.model.inputs import show_timing
from delaytasks.model.policies import UNCHANGED, Policy
from delaytasks.model.task import DelayedTask
from delaytasks.recurring.definition import FIELDS, RecurringOptions, RecurringSchedule
from delaytasks.recurring.timing import ANY_START, EVERY
from delaytasks.runtime import runtime_of


def install(app: Flask) -> None:
    app.add_url_rule("/policies", view_func=policies)
    app.add_url_rule("/policies/limits", view_func=set_limits, methods=["POST"])
    for name in POLICY_BUTTONS:
        path = f"/policies/{name.removesuffix('_policy')}"
        app.add_url_rule(path, name, _policy_button(name), methods=["POST"])
    app.add_url_rule("/recurring", view_func=recurring)
    app.add_url_rule("/recurring", view_func=set_recurring, methods=["POST"])
    for name in RECURRING_BUTTONS:
        path = f"/recurring/{name.removesuffix('_recurring')}"
        app.add_url_rule(path, name, _recurring_button(name), methods=["POST"])


@requires(Role.VIEW)
def policies() -> str:
    found, tag = state().snapshot(), request.args.get("tag", "").strip()
    return render_template(
        "policies.html", page="policies", s=found, now=found.now, edited=_limited(tag)
    )


def _limited(tag: str) -> Policy | None:
    """Return the policy of a tag, as it is stored now, if it has limits."""
    stored = state().delays.policies.list(tag=tag) if tag else []
    return next((policy for policy in stored if policy.has_limits), None)


def _named() -> dict[str, Any]:
    kind, name = request.form.get("kind"), request.form.get("name", "").strip()
    if kind not in ("tag", "queue"):
        abort(400)
    return {kind: name}


#: The role and the sentence for the viewer.
POLICY_BUTTONS = {
    "pause": (Role.OPERATE, "The {0.kind} {0.name} is paused. Tasks that run will finish."),
    "resume": (Role.OPERATE, "The {0.kind} {0.name} continues."),
    "remove_policy": (Role.ADMIN, "The pause and the limits of the {0.kind} {0.name} are removed."),
}


def _policy_button(name: str) -> Callable[[], Response]:
    (role, sentence), method = POLICY_BUTTONS[name], name.removesuffix("_policy")

    @requires(role)
    def press() -> Response:
        until = request.form.get("until", "").strip()
        what = _named() | ({"until": until} if until else {})

        def do() -> str:
            done = getattr(state().delays.policies, method)(**what, actor=viewer().name)
            return sentence.format(done)

        return act(name, what, do)

    return press


@requires(Role.ADMIN)
def set_limits() -> Response:
    named, delays = _named(), state().delays
    given = {name: request.form[name].strip() for name in _LIMITS if name in request.form}

    def do() -> str:
        tag = named.get("tag", "")
        if "is_change" not in request.form and _limited(tag) is not None:
            raise InvalidInputError(
                f"the tag {tag} has limits already: change them in the list", "tag"
            )
        limits = {name: _limit(name, text) for name, text in given.items()}
        policy = delays.policies.set(**named, **limits, actor=viewer().name)
        return f"The limits of the {policy.kind} {policy.name} are changed."

    return act("set_limits", {**named, **given}, do)


_LIMITS = ("concurrency", "concurrency_per_key", "rate")


def _limit(name: str, text: str) -> Any:
    """Return the limit that a field says; an empty field means no limit."""
    if text == "unchanged":
        return UNCHANGED
    if not text:
        return None
    if name == "rate":
        return text
    if not text.isdigit():
        raise InvalidInputError(f"{name} is a number, not {text!r:.40}", name)
    return int(text)


SCHEDULES_PER_PAGE = 100
#: Occurrences that are shown of each schedule.
NEXT = 3
#: The fields of the form, apart from the name and the body.
FORM_FIELDS = ("tag", "cron", "every", "tz", "queue", "missed", "overlap")


@requires(Role.VIEW)
def recurring() -> str:
    delays = state().delays
    now = runtime_of(delays).clock.now()
    after, prefix = request.args.get("after") or None, request.args.get("prefix") or None
    found = delays.recurring.list(prefix=prefix, after=after, limit=SCHEDULES_PER_PAGE)
    name = request.args.get("name", "").strip()
    edited = _stored(name) if name else None
    return render_template(
        "recurring.html",
        page="recurring",
        schedules=[(each, show_timing(each.timing), _next(each, now)) for each in found],
        more=found[-1].name if len(found) == SCHEDULES_PER_PAGE else None,
        prefix=prefix or "",
        edited=edited,
        values={} if edited is None else _values_of(edited),
        body="" if edited is None else _body_text(edited),
        now=now,
    )


def _next(schedule: Any, now: datetime) -> list[datetime]:
    try:
        occurrences: list[datetime] = schedule.next(NEXT, now)
        return occurrences
    except DelayTaskError:  # another program has written the timing
        return []


def _name() -> str:
    name = request.form.get("name", "").strip()
    if not name:
        abort(400)
    return name


#: The role and the sentence for the viewer.
RECURRING_BUTTONS = {
    "pause_recurring": (Role.OPERATE, "The schedule {name} is paused."),
    "resume_recurring": (Role.OPERATE, "The schedule {name} continues with its next occurrence."),
    "run_recurring": (Role.OPERATE, "The task {done.id} of the schedule {name} is due now."),
    "remove_recurring": (Role.ADMIN, "The schedule {name} is removed."),
}


def _recurring_button(button: str) -> Callable[[], Response]:
    (role, sentence), word = RECURRING_BUTTONS[button], button.removesuffix("_recurring")

    @requires(role)
    def press() -> Response:
        name = _name()

        def do() -> str:
            schedules = state().delays.recurring
            if word == "run":
                return sentence.format(name=name, done=schedules.schedule_now(name))
            getattr(schedules, word)(name, actor=viewer().name)
            return sentence.format(name=name)

        return act(button, {"recurring": name}, do)

    return press


@requires(Role.ADMIN)
def set_recurring() -> Response:
    """Add a schedule, or change the one of this name, which keeps the options without a field."""
    name, form, schedules = _name(), request.form, state().delays.recurring
    given = {field: form[field].strip() for field in FORM_FIELDS if field in form}
    text = form.get("body", "").strip()

    def do() -> str:
        known = _stored(name)
        if known is not None and "is_change" not in form:
            raise InvalidInputError(
                f"there is a schedule {name} already: change it in the list", "name"
            )
        body = known.body if known is not None and not text else _body(text)
        values: dict[str, Any] = {}
        if known is not None:
            kept = _kept_options(known, given.get("tag", known.tag), body)
            values = {**kept, **_values_of(known)}
        values |= given
        options = {option: value for option, value in values.items() if value not in (None, "")}
        schedules.set(name, options.pop("tag", ""), body, actor=viewer().name, **options)
        return f"The schedule {name} is stored."

    shown = {field: value for field, value in given.items() if value}
    return act("set_recurring", {"recurring": name, **shown}, do)


def _stored(name: str) -> RecurringSchedule | None:
    try:
        return state().delays.recurring.get(name)
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
    if not text:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the body is not JSON: {error}", "body") from None
