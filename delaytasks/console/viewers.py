"""The roles of the console, and the rules that name the viewer of a request.

Viewers log in with a password of the file `console-users.json`, are named by a proxy that
authenticates, or are the users of the web framework that mounts the console.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from werkzeug.security import check_password_hash, generate_password_hash

from delaytasks.model.clock import monotonic
from delaytasks.model.errors import ConfigError
from delaytasks.model.inputs import ACTOR_LENGTH
from delaytasks.model.text import one_line
from delaytasks.operate.serving import EntryFile
from delaytasks.settings import make_folder, write_file


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


#: The name, in the WSGI environment, of a function that the integration with a web framework sets.
#: It returns a context manager, whose value is the request of the framework.
HOST_REQUEST = "delaytasks.host_request"


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
