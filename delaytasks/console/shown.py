"""Times and numbers as the pages show them."""

from __future__ import annotations

import re
from datetime import datetime, tzinfo

from flask import Flask, session
from markupsafe import Markup

from delaytasks.model.clock import UTC
from delaytasks.model.errors import InvalidInputError
from delaytasks.model.inputs import show_duration
from delaytasks.model.text import some_values
from delaytasks.operate.task_calls import pretty_body, pretty_result
from delaytasks.operate.texts import last_line, show_from_now, show_measured, show_offset
from delaytasks.recurring.definition import zone_of

#: An instant in a sentence or in a log entry, but not in the key of an occurrence, after "@".
_INSTANT = re.compile(
    r"(?<![\w@])[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]+)?(?:Z|\+00:00)"
)


def viewer_zone() -> tzinfo:
    """Return the time zone that the viewer has chosen; UTC by default."""
    try:
        return zone_of(session["zone"]) if "zone" in session else UTC
    except InvalidInputError:  # another process of the console may know more zones
        return UTC


def local_text(value: datetime) -> str:
    """Return an instant in the viewer's time zone, with the name of the zone."""
    try:
        local = value.astimezone(viewer_zone())
    except (OverflowError, ValueError):  # in the first or the last year
        local = value
    return f"{local:%Y-%m-%d %H:%M:%S} {local.strftime('%Z') or local.strftime('%z')}"


def instant(value: datetime | None, now: datetime | None = None) -> Markup:
    """Return an instant, with the distance from `now` if it is given."""
    if value is None:
        return Markup('<span class="none">–</span>')
    iso, text = value.isoformat(), local_text(value)
    if now is None:
        return Markup('<time datetime="{}">{}</time>').format(iso, text)
    return Markup('<time datetime="{}" title="{}">{}</time> <span class="muted">{}</span>').format(
        iso, text, text, show_from_now(value, now)
    )


def distance(value: datetime | None, now: datetime) -> Markup:
    """Return only the distance from `now`; the instant is its title."""
    if value is None:
        return instant(None)
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        value.isoformat(), local_text(value), show_from_now(value, now)
    )


def local_times(value: object) -> str:
    """Return a text whose instants in UTC are written in the viewer's time zone, with its name.

    A list is shortened to its first values.
    """
    text = some_values(value) if isinstance(value, (list, tuple)) else str(value)

    def local(found: re.Match[str]) -> str:
        try:
            return local_text(datetime.fromisoformat(f"{found[0][:19]}+00:00"))
        except ValueError:
            return found[0]

    return _INSTANT.sub(local, text)


def install_filters(app: Flask) -> None:
    shown = (instant, distance, local_times)
    app.jinja_env.filters.update({filter.__name__: filter for filter in shown})
    app.jinja_env.globals["zip"] = zip
    app.jinja_env.filters.update(
        error_line=lambda error: last_line(error, 160) if error else "",
        pretty_body=pretty_body,
        pretty_result=pretty_result,
        duration=show_duration,
        offset=show_offset,
        measured=show_measured,
        number=lambda value: f"{value:,}",
        # What people call the statuses. The words are also the names of CSS classes.
        status_word=lambda name: "waiting" if name == "NOT_COMPLETE" else name.lower(),
    )
