"""Makes the WSGI application of the console, with its login page, and serves it alone."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flask import Flask, abort, redirect, render_template, request, session, url_for
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from delaytasks.client import DelayTasks
from delaytasks.console import pages_overview, pages_plans, pages_tags, pages_tasks
from delaytasks.console.pages_tags import known_names
from delaytasks.console.requests import (
    SESSION_S,
    ConsoleState,
    audit_refusals,
    back,
    csrf_token,
    now_s,
    protect,
    requires,
    safe_next,
    state,
    viewer,
)
from delaytasks.console.shown import install_filters, zone_label, zone_of
from delaytasks.console.viewers import FIRST_USER, Access, ProxyAccess, Role, UserFile, session_key
from delaytasks.core.errors import DelayTaskError, StoreError, TaskNotFoundError
from delaytasks.core.text import installed_version, one_line
from delaytasks.operations.health import HealthChecks, Probes
from delaytasks.runtime import runtime_of
from delaytasks.storage.searching import SearchTimeoutError

logger = logging.getLogger(__name__)
THEMES = ("auto", "light", "dark")
#: The files in the data folder.
USERS, KEY = "console-users.json", "console-key"
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


def make_console(delays: DelayTasks, access: Access, *, secret_key: str | None = None) -> Flask:
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
    _install_login(app)
    for pages in (pages_overview, pages_tasks, pages_tags, pages_plans):
        pages.install(app)
    Probes(lambda: HealthChecks(runtime_of(delays).store, delays.settings)).add_to(app)
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
        return _error_page(404, "Not found", str(error))
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


# -- login ----------------------------------------------------------------------------------------


def _install_login(app: Flask) -> None:
    app.add_url_rule("/login", view_func=login, methods=["GET"])
    app.add_url_rule("/login", view_func=log_in, methods=["POST"])
    app.add_url_rule("/logout", view_func=log_out, methods=["POST"])
    app.add_url_rule("/preferences", view_func=preferences, methods=["POST"])


def login() -> tuple[str, int]:
    if not state().access.has_login:
        abort(404)
    return _login_page(None, 200)


def log_in() -> tuple[str, int] | Response:
    users, limit = state().access, state().logins
    if not isinstance(users, UserFile):
        abort(404)
    name, address = request.form.get("name", ""), request.remote_addr or ""
    wait_s = limit.wait_s(name[:200], address)
    if wait_s:
        return _login_page(f"Too many failed logins. Try again in {wait_s:.0f} seconds.", 429)
    found = users.check(name, request.form.get("password", "")[:1000])
    if found is None:
        limit.failed(name[:200], address)
        logger.warning("console: failed login as %s from %s", one_line(name, 60), address)
        return _login_page("The name or the password is wrong.", 401)
    limit.succeeded(name[:200], address)
    kept = {each: session[each] for each in ("zone", "theme") if each in session}
    session.clear()  # also the CSRF token: an attacker may have set the old one
    session.permanent = True
    session.update(kept, logged_in_at=now_s(), **found)
    logger.info("console: login of %s from %s", one_line(name, 60), address)
    return redirect(safe_next(request.form.get("next")), 303)


def _login_page(problem: str | None, code: int) -> tuple[str, int]:
    target = request.values.get("next", "")
    return render_template("login.html", next=target, problem=problem), code


@requires(Role.VIEW)
def log_out() -> Response:
    session.clear()
    return redirect(url_for("login" if state().access.has_login else "overview"), 303)


@requires(Role.VIEW)
def preferences() -> Response:
    """Choose the time zone and the colours."""
    zone, theme = request.form.get("zone"), request.form.get("theme")
    if zone and zone_of(zone) is not None:
        session["zone"] = zone
    if theme in THEMES:
        session["theme"] = theme
    return back()


# -- alone ----------------------------------------------------------------------------------------


def users_of(delays: DelayTasks) -> UserFile:
    """Return the file of users in the data folder."""
    return UserFile(Path(delays.settings.data_dir).absolute() / USERS)


def proxy_access(delays: DelayTasks, header: str, proxies: Sequence[str]) -> ProxyAccess:
    """Return the rule for a proxy that names the user in a header; the file has the roles."""
    return ProxyAccess(header, proxies, Role.VIEW, users_of(delays).role)


def standalone(
    delays: DelayTasks, say: Callable[[str], None], access: Access | None = None
) -> Flask:
    """Return the console for a server of its own.

    Parameters
    ----------
    say
        Prints the first password. It is generated once, and stored only as a hash.
    access
        The rule that names the viewers; None means the file of users.
    """
    users = users_of(delays)
    key = session_key(users.path.with_name(KEY))
    if access is not None:
        return make_console(delays, access, secret_key=key)
    password = users.make_first()
    if password is not None:
        say(f"The console's first user is {FIRST_USER} with the password {password}")
        say(f"It is printed once; {users.path} has its hash.")
    return make_console(delays, users, secret_key=key)
