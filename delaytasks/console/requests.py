"""Finds the viewer of each request, checks the request, and keeps what all requests share.

Viewers log in with a password of the file `console-users.json`, are named by a proxy that
authenticates, or are the users of the web framework that mounts the console. Each request is
checked: the viewer, the role of its route, the CSRF token. Each action is recorded in the audit
table with the name of its viewer.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from functools import partial
from pathlib import Path
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
from werkzeug.security import check_password_hash, generate_password_hash
from werkzeug.wrappers import Response as AnyResponse

from delaytasks.client import DelayTasks
from delaytasks.model.clock import monotonic
from delaytasks.model.errors import ConfigError, DelayTaskError
from delaytasks.model.inputs import ACTOR_LENGTH
from delaytasks.model.text import one_line
from delaytasks.operate.serving import ENDPOINTS, HOST_REQUEST, EntryFile, SharedCache
from delaytasks.operate.state import DeploymentState, ask_broker
from delaytasks.operate.task_calls import record_action
from delaytasks.runtime import Runtime, runtime_of
from delaytasks.settings import make_folder, write_file

logger = logging.getLogger(__name__)


# -- viewers --------------------------------------------------------------------------------------


class Role(IntEnum):
    """What a viewer may do. Each role may do what the roles before it may."""

    #: Read all pages, without bodies, meta and results.
    VIEW = 1
    #: Read bodies; cancel, reschedule and rerun tasks; pause and resume.
    OPERATE = 2
    #: Change limits; define and remove recurring schedules.
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> Role:
        try:
            return cls[name.upper()]
        except KeyError:
            names = ", ".join(role.label for role in cls)
            raise ConfigError(f"{name!r:.40} is no role of the console: {names}") from None

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Viewer:
    """The person who looks at the console. The name is the actor of each action."""

    name: str
    role: Role

    @classmethod
    def of(cls, name: object, role: Role | str) -> Viewer:
        """Return a viewer; the name is made fit for the audit table."""
        chosen = role if isinstance(role, Role) else Role.named(role)
        return cls(one_line(str(name), ACTOR_LENGTH - 1), chosen)


def proxy_viewer(
    header: str, proxies: Sequence[str], role: Callable[[str], Role | None]
) -> Callable[[Mapping[str, Any]], Viewer | None]:
    """Return a function that names the viewer of a WSGI environment, for `make_console`.

    A proxy in front of the console authenticates, and names the user in a header, which counts
    only if the request comes directly from one of the proxy's addresses.

    Parameters
    ----------
    header
        The name of the header, such as `X-Forwarded-User`.
    proxies
        Addresses or networks of the proxy.
    role
        Returns the role of a user; None means VIEW.
    """
    variable = "HTTP_" + header.upper().replace("-", "_")
    try:
        networks = [ipaddress.ip_network(each, strict=False) for each in proxies]
    except ValueError as error:
        raise ConfigError(f"the address of the proxy is wrong: {error}") from None

    def find(environ: Mapping[str, Any]) -> Viewer | None:
        name = str(environ.get(variable, "")).strip()
        try:
            peer = ipaddress.ip_address(str(environ.get("REMOTE_ADDR")))
        except ValueError:
            return None
        if not name or not any(peer in network for network in networks):
            return None
        return Viewer.of(name, role(name) or Role.VIEW)

    return find


def derived_key(secret: str | bytes) -> str:
    """Return a key for the console's sessions, with which nobody can sign those of the host."""
    text = secret if isinstance(secret, bytes) else secret.encode()
    return hashlib.sha256(b"delaytasks console:" + text).hexdigest()


# -- viewers who log in ---------------------------------------------------------------------------


#: A shorter password is refused.
MIN_PASSWORD = 10
#: The hash that an unknown name is compared with, so that it takes as long as a known one.
_NOBODY = generate_password_hash(secrets.token_urlsafe())
FIRST_USER = "admin"


class UserFile(EntryFile[Mapping[str, Any]]):
    """Users who log in on the console's own page. The file is read again when it changes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "users", _check_users, "console users")
        # A file of its own, so that no log out undoes a change of the users at the same time.
        ends = path.with_name(f"{path.stem}-logged-out.json")
        self._ends = EntryFile(ends, "ends", _read_times, "the last log outs of console users")
        self._ending = threading.Lock()

    # -- read -------------------------------------------------------------------------------------

    def role(self, name: str) -> Role | None:
        user = self.entries.get(name)
        return None if user is None else Role.named(user["role"])

    def viewer(self, session: Mapping[str, Any]) -> Viewer | None:
        """Return the user of a session, unless it has ended: by a log out or a new password."""
        name = session.get("user")
        user = self.entries.get(name) if isinstance(name, str) else None
        if user is None or session.get("password") != _mark(user.get("password", "")):
            return None
        if session.get("logged_in_at", 0.0) <= self._ends.content().get(str(name), 0.0):
            return None
        return Viewer.of(name, user["role"])

    def check(self, name: str, password: str) -> dict[str, str] | None:
        """Return what the session of a user keeps, or None if name or password is wrong."""
        hashed = self.entries.get(name, {}).get("password", "")
        is_right = check_password_hash(hashed or _NOBODY, password)
        return {"user": name, "password": _mark(hashed)} if hashed and is_right else None

    # -- write ------------------------------------------------------------------------------------

    def set(self, name: str, password: str, role: Role) -> None:
        """Add a user, or replace one."""
        if not name.strip():
            raise ConfigError("the name of a console user is not empty")
        if len(password) < MIN_PASSWORD:
            raise ConfigError(f"a password of the console has at least {MIN_PASSWORD} characters")
        user = {"password": generate_password_hash(password), "role": role.label}
        self.write({**self.entries, name: user})

    def log_out(self, name: str, at_s: float) -> None:
        """End all sessions of a user that began until then, also those of copied cookies."""
        with self._ending:
            ends = {**self._ends.content(), name: at_s}
            self._ends.write({user: ends[user] for user in self.entries if user in ends})

    def make_first(self) -> str | None:
        """Make an administrator if there are no users, and return the generated password."""
        if self.entries:
            return None
        password = secrets.token_urlsafe(15)
        self.set(FIRST_USER, password, Role.ADMIN)
        return password


def session_key(path: Path) -> str:
    """Return the key that signs sessions. It is made once, so sessions survive a restart."""
    try:
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        make_folder(path.parent)
        write_file(path, secrets.token_hex(32))
        return path.read_text(encoding="ascii")


def _check_users(entries: Mapping[str, Any]) -> Mapping[str, Any]:
    for each in entries.values():
        Role.named(each["role"])
    return entries


def _read_times(entries: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(at_s) for name, at_s in entries.items()}


def _mark(hashed: str) -> str:
    """Return a value that changes with the password and reveals nothing about it."""
    return hashlib.sha256(f"console session:{hashed}".encode()).hexdigest()[:16]


#: Failed logins of one name from one address, and of all names from one address, that are allowed
#: in a period, and the period.
MOST_FAILURES, MOST_OF_ADDRESS, PERIOD_S = 5, 50, 300.0


#: The names and addresses that are remembered. Those that failed longest ago are forgotten first.
MOST_FAILING = 10_000


class LoginLimit:
    """Limits failed logins.

    A name alone has no limit: anyone could lock out an operator by name.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The times of the last failed logins of an address, and of a name from an address.
        self._failures: dict[tuple[str, ...], deque[float]] = {}

    def wait_s(self, name: str, address: str) -> float:
        """Return the seconds until this name may try again from this address, 0 if it may now."""
        with self._lock:
            known = [self._failures.get(key, deque()) for key in ((name, address), (address,))]
            began = [times[0] for times in known if len(times) == times.maxlen]
        return max([0.0, *(at + PERIOD_S - monotonic() for at in began)])

    def failed(self, name: str, address: str) -> None:
        with self._lock:
            for key, most in (((name, address), MOST_FAILURES), ((address,), MOST_OF_ADDRESS)):
                times = self._failures.pop(key, deque(maxlen=most))
                times.append(monotonic())
                self._failures[key] = times
            while len(self._failures) > MOST_FAILING:
                del self._failures[next(iter(self._failures))]

    def succeeded(self, name: str, address: str) -> None:
        # The failures of the address stay: a user could forget them between guesses of other
        # passwords.
        with self._lock:
            self._failures.pop((name, address), None)


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
