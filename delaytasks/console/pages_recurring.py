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
from delaytasks.core.errors import BodyNotJSONError, DelayTaskError
from delaytasks.wiring import wiring_of

SCHEDULES_PER_PAGE = 100
#: Occurrences that are shown of each schedule.
NEXT = 3


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
    now = wiring_of(delays).clock.now()
    after, prefix = request.args.get("after") or None, request.args.get("prefix") or None
    found = delays.recurring.list(prefix=prefix, after=after, limit=SCHEDULES_PER_PAGE)
    return render_template(
        "recurring.html",
        page="recurring",
        schedules=[(each, _next(each, now)) for each in found],
        more=found[-1].name if len(found) == SCHEDULES_PER_PAGE else None,
        prefix=prefix or "",
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
    """Add a schedule, or change the one of this name."""
    name, form, schedules = _name(), request.form, state().delays.recurring
    fields = ("tag", "cron", "every", "tz", "queue", "missed", "overlap")
    given = {field: form[field].strip() for field in fields if form.get(field, "").strip()}

    def do() -> str:
        options: dict[str, Any] = dict(given)
        tag = options.pop("tag", "")
        schedules.set(name, tag, _body(form.get("body", "")), actor=viewer().name, **options)
        return f"The schedule {name} is stored."

    return act("set_recurring", {"recurring": name, **given}, do)


def _body(text: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BodyNotJSONError(f"the body is not JSON: {error}") from None
