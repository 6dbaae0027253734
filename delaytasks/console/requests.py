"""The state that all requests of a console share, and the checks of each request.

`ConsoleState` has the cached snapshot that all viewers share. Each request is checked: the viewer,
the role of its route, the CSRF token. Each action is recorded in the audit table with the name of
its viewer.
"""

from __future__ import annotations

import hmac
import logging
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

from flask import (
    Flask,
    Response,
    abort,
    current_app,
    g,
    redirect,
    render_template,
    request,
    session,
    url_for,
)
from flask.sessions import SecureCookieSessionInterface
from werkzeug.wrappers import Response as AnyResponse

from delaytasks.client import DelayTasks
from delaytasks.console.viewers import HOST_REQUEST, LoginLimit, Role, UserFile, Viewer
from delaytasks.model.errors import DelayTaskError
from delaytasks.operate.serving import ENDPOINTS, SharedCache
from delaytasks.operate.state import DeploymentState, ask_broker
from delaytasks.operate.task_calls import record_action
from delaytasks.runtime import Runtime, runtime_of

logger = logging.getLogger(__name__)


# -- what the requests share ----------------------------------------------------------------------


#: Seconds for which all viewers see the same numbers, and the same answer of the broker.
SNAPSHOT_S, BROKER_S = 4.0, 20.0
#: Bulk operations that one process does simultaneously.
MOST_ACTIVE = 4
#: A larger number of tasks of a status is an estimate of the database.
MOST_COUNTED_ROWS = 20_000
EXTENSION = "delaytasks_console"
#: The file of users, or a function that returns the viewer of a request of the host.
Viewers = UserFile | Callable[[Any], Viewer | None]


class Route(NamedTuple):
    """A page or an action. One without a template answers by itself."""

    path: str
    view: Callable[..., Any]
    template: str | None
    #: The least role that may call it.
    role: Role
    method: str


#: The pages and actions by their endpoint. Others are refused.
ROUTES: dict[str, Route] = {}
View = TypeVar("View", bound=Callable[..., Any])


def route(
    path: str, template: str | None = None, role: Role = Role.VIEW, *, action: str | None = None
) -> Callable[[View], View]:
    """Make a function a page, whose endpoint is its name, or an action with this endpoint."""

    def add(view: View) -> View:
        method = "GET" if action is None else "POST"
        ROUTES[action or view.__name__] = Route(path, view, template, role, method)
        return view

    return add


class ConsoleState:
    """The state that all requests of one console share."""

    def __init__(self, delays: DelayTasks, viewers: Viewers) -> None:
        self.delays = delays
        self.viewers = viewers
        self.cache = SharedCache()
        #: The runs, which no action changes.
        self.history = SharedCache()
        #: The bulk operations of this process, and the event that stops each, by its log entry.
        self.threads = threading.BoundedSemaphore(MOST_ACTIVE)
        self.stops = WeakValueDictionary[int, threading.Event]()
        self.logins = LoginLimit()

    def snapshot(self) -> DeploymentState:
        """Return the state of the deployment, which is some seconds old, and up to a minute if the
        database answers slowly."""
        found = copy(self.cache.get("snapshot", SNAPSHOT_S, self._read_state))
        ask = partial(ask_broker, runtime_of(self.delays))
        found.broker_error = self.cache.get("broker", BROKER_S, ask)
        return found

    def _read_state(self) -> DeploymentState:
        found = DeploymentState(runtime_of(self.delays), MOST_COUNTED_ROWS)
        found.add_failures()
        return found


def state() -> ConsoleState:
    found: ConsoleState = current_app.extensions[EXTENSION]
    return found


def runtime() -> Runtime:
    return runtime_of(state().delays)


def now() -> datetime:
    """Return the time by the clock that all processes share."""
    return runtime().clock.now()


def viewer() -> Viewer:
    """Return the viewer of this request, who has logged in."""
    found: Viewer = g.viewer
    return found


# -- before and after each request ----------------------------------------------------------------


#: Seconds after which a viewer logs in again, even if the session was used.
SESSION_S = 12 * 3600
HEADERS = {
    # No inline script or style, and no other host.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class _Sessions(SecureCookieSessionInterface):
    """Session cookies that are secure wherever the request is."""

    def get_cookie_secure(self, app: Flask) -> bool:
        return request.is_secure

    def get_cookie_path(self, app: Flask) -> str:
        return request.script_root or "/"


def protect(app: Flask, shared: ConsoleState) -> None:
    """Add all pages and actions to the app, and let each request pass these checks."""
    app.extensions[EXTENSION] = shared
    app.session_interface = _Sessions()
    for endpoint, route in ROUTES.items():
        view = _rendered(route) if route.template else route.view
        app.add_url_rule(route.path, endpoint, view, methods=[route.method])
    app.before_request(_admit)
    app.after_request(_finish)


def _rendered(route: Route) -> Callable[..., Any]:
    def show(**values: Any) -> Any:
        found = route.view(**values)
        if not isinstance(found, dict):
            return found
        shown = {"page": request.endpoint, "now": now(), **found}
        return render_template(str(route.template), **shown)

    return show


#: Addresses that answer without asking who the viewer is.
_FOR_ANYONE = {"static", *ENDPOINTS}
#: Pages without a viewer.
_OPEN = {"login", "log_in"}


def _admit() -> AnyResponse | None:
    g.viewer = None  # the error page needs it if the next lines raise
    if request.endpoint in _FOR_ANYONE:
        return None
    g.viewer = _find_viewer()
    if request.method not in ("GET", "HEAD", "OPTIONS"):
        _check_form()
    has_login = isinstance(state().viewers, UserFile)
    if request.endpoint in _OPEN and has_login:
        return None
    if g.viewer is None and has_login and request.method == "GET":
        target = request.full_path.rstrip("?")
        return redirect(url_for("login", next=target if target != "/" else None), 303)
    if g.viewer is None:
        abort(401)
    if request.endpoint is None:
        return None  # Flask answers 404 or 405
    route = ROUTES.get(request.endpoint)
    if route is None or g.viewer.role < route.role:
        abort(403)
    return None


def _find_viewer() -> Viewer | None:
    viewers = state().viewers
    if isinstance(viewers, UserFile):
        at = session.get("logged_in_at")
        is_over = not isinstance(at, float) or now().timestamp() - at > SESSION_S
        return None if is_over else viewers.viewer(session)
    with request.environ.get(HOST_REQUEST, lambda: nullcontext(request.environ))() as host:
        return viewers(host) or None  # a rule may return False


def _check_form() -> None:
    """Refuse a form that another site makes a browser send, or without the session's token."""
    origin = request.headers.get("Origin")
    is_foreign = origin is not None and origin.partition("://")[2] != request.host
    if is_foreign or request.headers.get("Sec-Fetch-Site", "same-origin") == "cross-site":
        abort(403)
    sent = request.form.get("csrf", "").encode()
    if not hmac.compare_digest(csrf_token().encode(), sent):
        abort(403)


def csrf_token() -> str:
    """Return the token that each form of this session contains."""
    token: str = session.setdefault("csrf", secrets.token_urlsafe(24))
    return token


def _finish(response: Response) -> Response:
    response.headers.update(HEADERS)
    is_static = request.endpoint == "static"
    kept = "public, max-age=31536000, immutable" if is_static else "no-store"
    response.headers["Cache-Control"] = kept
    # An action that was refused is recorded: by role, token or origin, or as impossible. `perform`
    # answers with a redirect, so that its refusals are not recorded twice.
    route = ROUTES.get(request.endpoint or "")
    is_action = route is not None and request.method == "POST" and route.role > Role.VIEW
    if is_action and response.status_code in REFUSED and g.get("viewer") is not None:
        record(request.endpoint or "", given(), is_refused=True)
    return response


def safe_next(target: str | None) -> str:
    """Return the address of a page of this console, whatever a request asks for."""
    # A second slash or a backslash would begin the name of another host. Browsers drop blanks.
    is_ours = re.fullmatch(r"/(?!/)[^\\\x00-\x20]*", target or "")
    return f"{request.script_root}{target}" if is_ours else url_for("overview")


def back() -> AnyResponse:
    return redirect(safe_next(request.form.get("next")), 303)


# -- log entries ----------------------------------------------------------------------------------


#: The statuses of a refused action. The form of a request that is too large (413) cannot be read.
REFUSED = {400, 403, 404}
#: Fields that are not part of a log entry. A body may contain secrets.
_LEFT_OUT = {"csrf", "next", "body", "version"}
#: Fields of a form that are audited, and their characters: nobody has checked those of a refused
#: one.
MOST_FIELDS, MOST_CHARACTERS = 20, 200


def given() -> dict[str, Any]:
    """Return what this request names in its form and its path, as a log entry has it."""
    fields = {name: ", ".join(values) for name, values in request.form.lists()}
    fields |= request.view_args or {}
    shown = [(name, text) for name, text in fields.items() if text and name not in _LEFT_OUT]
    return {name[:MOST_CHARACTERS]: text[:MOST_CHARACTERS] for name, text in shown[:MOST_FIELDS]}


def record(action: str, what: dict[str, Any], *, is_refused: bool = False) -> None:
    """Write the log entry of an action of the viewer.

    An action on one task is named so: the entries of `cancel`, for example, are of many tasks.
    """
    actor, name = viewer().name, f"{action}_task" if "id" in what else action
    logger.info("console: %s by %s: %r%s", name, actor, what, " (refused)" * is_refused)
    try:
        record_action(runtime(), name, what, actor, is_refused=is_refused)
    except DelayTaskError:
        # The action itself may be done, and the log has it.
        logger.exception("console: the log entry of %s could not be written", name)
