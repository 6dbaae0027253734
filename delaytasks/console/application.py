"""Makes the WSGI application of the console."""

from __future__ import annotations

import logging
import secrets
from typing import Any

from delaytasks.client import DelayTasks
from delaytasks.core.errors import DelayTaskError, SearchTimeoutError, StoreError, TaskNotFoundError
from delaytasks.core.installed import installed_version, needs_extra

with needs_extra("console", "the console"):
    from flask import Flask, render_template, request, session
    from werkzeug.exceptions import HTTPException

from delaytasks.console import (
    pages_forecast,
    pages_login,
    pages_many,
    pages_overview,
    pages_policies,
    pages_recurring,
    pages_tags,
    pages_tasks,
)
from delaytasks.console.actions import audit_refusals
from delaytasks.console.known_names import known_names
from delaytasks.console.requests import SESSION_S, ConsoleState, csrf_token, protect, viewer
from delaytasks.console.shown import install_filters, zone_label
from delaytasks.console.viewers import Access, Role
from delaytasks.operations.health import HealthChecks
from delaytasks.operations.probes import Probes
from delaytasks.runtime import runtime_of

logger = logging.getLogger(__name__)
#: Bytes that one request may contain.
MOST_BYTES = 1_000_000
#: The pages of the navigation: endpoint, name, and the key that opens the page after `g`.
PAGES = (
    ("overview", "Overview", "o"),
    ("tasks", "Tasks", "t"),
    ("tags", "Tags", "s"),
    ("failures", "Failures", "f"),
    ("forecast", "Forecast", "c"),
    ("recurring", "Recurring", "r"),
    ("policies", "Policies", "p"),
    ("queues", "Queues", "q"),
    ("workers", "Workers", "w"),
    ("audit", "Audit", "a"),
)


def make_console(
    delays: DelayTasks,
    access: Access,
    *,
    secret_key: str | None = None,
) -> Flask:
    """Return the console of `delays` as a WSGI application.

    Parameters
    ----------
    delays
        The `DelayTasks` whose tasks the console shows.
    access
        The rule that names the viewer of a request: `UserFile`, `ProxyAccess` or `HostAccess`.
    secret_key
        Signs the sessions. By default it is generated, so that sessions end with the process, and
        only one process can serve the console.

    Returns
    -------
    flask.Flask
        The application. It can be mounted at any path.

    Examples
    --------
    >>> console = make_console(delays, UserFile(Path("console-users.json")))
    """
    app = Flask(__name__, static_folder="static", template_folder="templates")
    app.secret_key = secret_key or secrets.token_hex(32)
    app.config.update(
        SESSION_COOKIE_NAME="delaytasks_console",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Lax",
        PERMANENT_SESSION_LIFETIME=SESSION_S,
        MAX_CONTENT_LENGTH=MOST_BYTES,
        MAX_FORM_PARTS=1000,
    )
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    install_filters(app)
    protect(app, ConsoleState(delays, access))
    audit_refusals(app)
    for pages in (
        pages_login,
        pages_overview,
        pages_tasks,
        pages_tags,
        pages_many,
        pages_forecast,
        pages_policies,
        pages_recurring,
    ):
        pages.install(app)
    Probes(lambda: HealthChecks(runtime_of(delays).shards, delays.settings)).add_to(app)
    app.context_processor(_of_every_page)
    app.register_error_handler(DelayTaskError, _refused)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _failed)
    return app


def _of_every_page() -> dict[str, Any]:
    def can(role: str) -> bool:
        return getattr(viewer(), "role", 0) >= Role.named(role)

    return {
        "pages": PAGES,
        "csrf": csrf_token,
        "viewer": viewer(),
        "can": can,
        "known": known_names,
        "zone": zone_label(),
        "theme": session.get("theme", "auto"),
        "here": request.full_path.rstrip("?"),
        "version": installed_version() or "?",
    }


def _refused(error: DelayTaskError) -> tuple[str, int]:
    if isinstance(error, TaskNotFoundError):
        return _error_page(404, "There is no such task", str(error))
    if isinstance(error, SearchTimeoutError):
        return _error_page(503, "The search took too long", str(error))
    if isinstance(error, StoreError):
        return _error_page(503, "The database does not answer", str(error))
    return _error_page(400, "This is not possible", str(error))


_TITLES = {
    401: (
        "Not logged in",
        "Log in to the application or proxy that this console is part of, as a user who may see "
        "it, and reload this page.",
    ),
    403: ("Not allowed", "Your role does not allow this, or the form is too old: reload its page."),
    404: ("There is no such page", "The address may be mistyped, or what it named is gone."),
}


def _http_error(error: HTTPException) -> Any:
    if error.response is not None:
        return error.response
    code = error.code or 500
    title, text = _TITLES.get(code, (error.name, error.description or ""))
    return _error_page(code, title, text)


def _failed(error: Exception) -> tuple[str, int]:
    logger.error("console: %s failed", request.endpoint, exc_info=error)
    return _error_page(500, "This page failed", "The log of the console has the traceback.")


def _error_page(code: int, title: str, text: str) -> tuple[str, int]:
    return render_template("error.html", code=code, title=title, text=text), code
