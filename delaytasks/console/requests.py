"""What happens before and after each request: the viewer, the role, the CSRF token, the headers."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flask import Flask, Response, abort, current_app, g, redirect, request, session, url_for
from flask.sessions import SecureCookieSessionInterface
from werkzeug.wrappers import Response as AnyResponse

from delaytasks.client import DelayTasks
from delaytasks.console.bulk_runs import BulkRuns
from delaytasks.console.cache import SharedCache
from delaytasks.console.login_limit import LoginLimit
from delaytasks.console.viewers import Access, Role, Viewer
from delaytasks.core.latest import Latest
from delaytasks.operations.policies import read_policies
from delaytasks.operations.probes import ENDPOINTS
from delaytasks.operations.state import DeploymentState, ServicesState, read_state
from delaytasks.runtime import runtime_of
from delaytasks.statistics.recent_failures import recent_failures
from delaytasks.timers.broker_link import bounded_connection

F = TypeVar("F", bound=Callable[..., Any])
#: Seconds for which all viewers see the same numbers, and the same answer of the broker.
SNAPSHOT_S, BROKER_S = 4.0, 20.0
#: A larger number of tasks of a status is an estimate of the database.
MOST_COUNTED_ROWS = 20_000
#: Seconds after which a viewer logs in again, however often the session was used.
SESSION_S = 12 * 3600
EXTENSION = "delaytasks_console"
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


class ConsoleState:
    """What the requests of one console share."""

    def __init__(self, delays: DelayTasks, access: Access) -> None:
        self.delays = delays
        self.access = access
        self.cache = SharedCache()
        #: What ran, which no action changes: a chart of a year is read rarely.
        self.history = SharedCache()
        self.forecast = Latest("forecast", delays.forecast)
        self.runs = BulkRuns(on_end=self.forget)
        self.logins = LoginLimit()

    def forget(self) -> None:
        """Drop what was read, after an action of many tasks: it may have spread a peak."""
        self.cache.forget()
        self.forecast = Latest("forecast", self.delays.forecast)

    def snapshot(self) -> DeploymentState:
        """Return the state of the deployment, which is some seconds old, and up to a minute if the
        database answers slowly."""
        found = self.cache.get(
            "snapshot",
            SNAPSHOT_S,
            self._read_state,
            has_failed=lambda taken: any(each.error for each in taken.databases),
        )
        if not found.services.uses_broker:
            return found
        error = self.cache.get("broker", BROKER_S, self._broker_error, has_failed=bool)
        return replace(found, services=found.services._replace(broker_error=error))

    def _read_state(self) -> DeploymentState:
        delays, wiring = self.delays, runtime_of(self.delays)
        services = ServicesState(delays.settings.timer, wiring.direct_timer is None)
        return read_state(
            runtime_of(delays).shards,
            delays.settings,
            partial(read_policies, wiring.store.policies),
            recent_failures,
            services,
            wiring.clock.now(),
            MOST_COUNTED_ROWS,
        )

    def _broker_error(self) -> str | None:
        limit_s = self.delays.settings.publish_limit_s
        try:
            with bounded_connection(runtime_of(self.delays).celery, limit_s):
                return None
        except Exception as error:  # each transport has its own errors, and the page shows them
            return f"{type(error).__name__}: {error}"


def state() -> ConsoleState:
    found: ConsoleState = current_app.extensions[EXTENSION]
    return found


def viewer() -> Viewer:
    """Return the viewer of this request, who has logged in."""
    found: Viewer = g.viewer
    return found


def requires(role: Role) -> Callable[[F], F]:
    """Declare the least role that a page or an action requires. A page without it is refused."""

    def declare(view: F) -> F:
        view.console_role = role  # type: ignore[attr-defined]
        return view

    return declare


class _Sessions(SecureCookieSessionInterface):
    """Session cookies that are secure wherever the request is."""

    def get_cookie_secure(self, app: Flask) -> bool:
        return request.is_secure

    def get_cookie_path(self, app: Flask) -> str:
        return request.script_root or "/"


def protect(app: Flask, shared: ConsoleState) -> None:
    """Let each request of the app pass these checks."""
    app.extensions[EXTENSION] = shared
    app.session_interface = _Sessions()
    app.before_request(_admit)
    app.after_request(_finish)


#: Addresses that answer without asking who the viewer is.
_FOR_ANYONE = {"static", *ENDPOINTS}
#: Pages without a viewer.
_OPEN = {"static", "login", "log_in"}


def _admit() -> AnyResponse | None:
    g.viewer = None  # the error page needs it if the next lines raise
    if request.endpoint in _FOR_ANYONE:
        return None
    if not _is_login_over():
        g.viewer = state().access.viewer(request.environ, session)
    if request.method not in ("GET", "HEAD", "OPTIONS"):
        _check_origin()
        _check_token()
    if request.endpoint in _OPEN and state().access.has_login:
        return None
    if g.viewer is None:
        return _without_viewer()
    if request.endpoint is None:
        return None  # Flask answers 404 or 405
    view = current_app.view_functions[request.endpoint]
    role = getattr(view, "console_role", None)
    if role is None or g.viewer.role < role:
        abort(403)
    return None


def _is_login_over() -> bool:
    if not state().access.has_login:
        return False
    at = session.get("logged_in_at")
    return not isinstance(at, float) or now_s() - at > SESSION_S


def now_s() -> float:
    """Return seconds since 1970, by the clock that all processes share."""
    return runtime_of(state().delays).clock.now().timestamp()


def _without_viewer() -> AnyResponse:
    if not state().access.has_login:
        abort(401)
    if request.method != "GET":
        abort(401)
    target = request.full_path.rstrip("?")
    return redirect(url_for("login", next=target if target != "/" else None), 303)


def _check_origin() -> None:
    """Refuse a request that another site makes a browser send."""
    origin = request.headers.get("Origin")
    is_foreign = origin is not None and urlsplit(origin).netloc != request.host
    if is_foreign or request.headers.get("Sec-Fetch-Site", "same-origin") == "cross-site":
        abort(403)


def _check_token() -> None:
    given = request.form.get("csrf") or request.headers.get("X-CSRF-Token", "")
    known = session.get("csrf")
    if not isinstance(known, str) or not hmac.compare_digest(known.encode(), given.encode()):
        abort(403)


def csrf_token() -> str:
    """Return the token that each form of this session contains."""
    if "csrf" not in session:
        session["csrf"] = secrets.token_urlsafe(24)
    token: str = session["csrf"]
    return token


def _finish(response: Response) -> Response:
    response.headers.update(HEADERS)
    if request.endpoint == "static":
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
    else:
        response.headers["Cache-Control"] = "no-store"
    return response


def safe_next(target: str | None) -> str:
    """Return the address of a page of this console, whatever a request asks for."""
    parts = urlsplit(target or "")
    is_ours = (
        bool(target)
        and not parts.scheme
        and not parts.netloc
        and parts.path.startswith("/")
        and not parts.path.startswith("//")
        and "\\" not in (target or "")
    )
    return f"{request.script_root}{target}" if is_ours else url_for("overview")
