"""Recurring schedules."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from flask import Flask, abort, render_template, request
from werkzeug.wrappers import Response

from delaytasks.console.actions import act
from delaytasks.console.requests import requires, state, viewer
from delaytasks.console.viewers import Role
from delaytasks.core.durations import show_timing
from delaytasks.core.errors import (
    BodyNotJSONError,
    DelayTaskError,
    InvalidQueryError,
    RecurringNotFoundError,
)
from delaytasks.recurrence.definition import options_of, timing_options
from delaytasks.recurrence.schedule import RecurringSchedule
from delaytasks.runtime import runtime_of

SCHEDULES_PER_PAGE = 100
#: Occurrences that are shown of each schedule.
NEXT = 3
#: The fields of the form, apart from the name and the body.
FORM_FIELDS = ("tag", "cron", "every", "tz", "queue", "missed", "overlap")


def install(app: Flask) -> None:
    app.add_url_rule("/recurring", view_func=recurring)
    app.add_url_rule("/recurring", view_func=set_recurring, methods=["POST"])
    app.add_url_rule("/recurring/pause", view_func=pause_recurring, methods=["POST"])
    app.add_url_rule("/recurring/resume", view_func=resume_recurring, methods=["POST"])
    app.add_url_rule("/recurring/run", view_func=run_recurring, methods=["POST"])
    app.add_url_rule("/recurring/remove", view_func=remove_recurring, methods=["POST"])


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


@requires(Role.OPERATE)
def pause_recurring() -> Response:
    name, schedules = _name(), state().delays.recurring

    def do() -> str:
        schedules.pause(name, actor=viewer().name)
        return f"The schedule {name} is paused."

    return act("pause_recurring", {"recurring": name}, do)


@requires(Role.OPERATE)
def resume_recurring() -> Response:
    name, schedules = _name(), state().delays.recurring

    def do() -> str:
        schedules.resume(name, actor=viewer().name)
        return f"The schedule {name} continues with its next occurrence."

    return act("resume_recurring", {"recurring": name}, do)


@requires(Role.OPERATE)
def run_recurring() -> Response:
    name, schedules = _name(), state().delays.recurring

    def do() -> str:
        return f"The task {schedules.run(name).id} of the schedule {name} is due now."

    return act("run_recurring", {"recurring": name}, do)


@requires(Role.ADMIN)
def remove_recurring() -> Response:
    name, schedules = _name(), state().delays.recurring

    def do() -> str:
        schedules.remove(name, actor=viewer().name)
        return f"The schedule {name} is removed."

    return act("remove_recurring", {"recurring": name}, do)


@requires(Role.ADMIN)
def set_recurring() -> Response:
    """Add a schedule, or change the one of this name, which keeps the options without a field."""
    name, form, schedules = _name(), request.form, state().delays.recurring
    given = {field: form[field].strip() for field in FORM_FIELDS if field in form}
    text = form.get("body", "").strip()

    def do() -> str:
        known = _stored(name)
        if known is not None and "is_change" not in form:
            raise InvalidQueryError(f"there is a schedule {name} already: change it in the list")
        body = known.body if known is not None and not text else _body(text)
        values: dict[str, Any] = {}
        if known is not None:
            kept = options_of(known, given.get("tag", known.tag), body)
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
    except RecurringNotFoundError:
        return None


def _values_of(schedule: RecurringSchedule) -> dict[str, Any]:
    """Return what the fields of the form show of a stored schedule."""
    same = ("tag", "tz", "queue", "missed", "overlap")
    return timing_options(schedule.timing) | {field: getattr(schedule, field) for field in same}


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
        raise BodyNotJSONError(f"the body is not JSON: {error}") from None
