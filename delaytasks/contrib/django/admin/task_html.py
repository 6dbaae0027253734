"""A task's status, body, key and failed attempts as HTML."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from django.contrib.admin.utils import quote
from django.db.models import Model
from django.template.defaultfilters import date as date_text
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html, format_html_join
from django.utils.timezone import localtime

from delaytasks.contrib.django.instance import project_delays
from delaytasks.core.attempt import Attempt
from delaytasks.core.durations import show_duration
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.core.text import last_line

logger = logging.getLogger(__name__)
NOTHING_SHOWN = "–"
ERROR_LENGTH = 120


def status_html(status: Status) -> Any:
    """Return the name of a status in the color of the status."""
    return format_html(
        '<span class="delays-status delays-{}">{}</span>', status.name.lower(), status.name
    )


def instant_html(instant: datetime | None) -> str:
    """Return an instant in Django's current time zone."""
    if instant is None:
        return NOTHING_SHOWN
    return str(date_text(localtime(instant), "Y-m-d H:i:s T"))


def distance_html(instant: datetime, now: datetime) -> Any:
    """Return the distance from now; the instant is its title."""
    distance_s = (instant - now).total_seconds()
    text = show_duration(distance_s)
    return format_html(
        '<span title="{}">{}</span>',
        instant_html(instant),
        f"in {text}" if distance_s > 0 else f"{text} ago",
    )


def text_html(text: str | None) -> Any:
    """Return a text of several lines; HTML in it is escaped."""
    return format_html('<pre class="delays-text">{}</pre>', text) if text else NOTHING_SHOWN


def attempts_html(attempts: Sequence[Attempt]) -> Any:
    if not attempts:
        return NOTHING_SHOWN
    rows = format_html_join(
        "",
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td>"
        "<td><details><summary>{}</summary>{}</details></td></tr>",
        (
            (
                each.number,
                instant_html(each.began),
                instant_html(each.ended),
                each.worker or NOTHING_SHOWN,
                last_line(each.error, ERROR_LENGTH),
                text_html(each.error),
            )
            for each in attempts
        ),
    )
    return format_html(
        "<table><thead><tr><th>attempt</th><th>began</th><th>ended</th><th>worker</th>"
        "<th>error</th></tr></thead><tbody>{}</tbody></table>",
        rows,
    )


def key_html(task: DelayTask, site: str) -> Any:
    """Return the key as a link to the object that it names, if the hook `object_of` returns one."""
    url = _url_of_object(task, site) if task.key is not None else None
    if url is None:
        return task.key or NOTHING_SHOWN
    return format_html('<a href="{}">{}</a>', url, task.key)


def _url_of_object(task: DelayTask, site: str) -> str | None:
    try:
        named = project_delays().object_of(task)
    except Exception:
        # The hook is the project's; its error must not hide the task.
        logger.exception("the hook object_of failed for task %s (%s)", task.id, task.tag)
        return None
    if isinstance(named, Model):
        meta: Any = named._meta
        view = f"admin:{meta.app_label}_{meta.model_name}_change"
        try:
            return str(reverse(view, args=(quote(named.pk),), current_app=site))
        except NoReverseMatch:  # the admin does not have this model
            return None
    is_url = isinstance(named, str) and named.startswith(("/", "https://", "http://"))
    return named if is_url else None
