"""The roles of the console, and the rules that name the viewer of a request."""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from delaytasks.core.errors import ConfigError
from delaytasks.core.inputs import ACTOR_LENGTH
from delaytasks.core.text import one_line


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


class Access(Protocol):
    """The rule that names the viewer of a request."""

    #: Whether viewers log in on the console's own page.
    has_login: bool

    def viewer(self, environ: Mapping[str, Any], session: Mapping[str, Any]) -> Viewer | None:
        """Return the viewer, or None if the request has none."""


class HostAccess:
    """The viewer is the user of the web framework that mounts the console.

    Parameters
    ----------
    find
        Returns the viewer of a request with this WSGI environment, or None.
    """

    has_login = False

    def __init__(self, find: Callable[[Mapping[str, Any]], Viewer | None]) -> None:
        self._find = find

    def viewer(self, environ: Mapping[str, Any], session: Mapping[str, Any]) -> Viewer | None:
        return self._find(environ)


class ProxyAccess:
    """A proxy in front of the console authenticates, and names the user in a header.

    The header counts only if the request comes directly from one of the proxy's addresses.

    Parameters
    ----------
    header
        The name of the header, such as `X-Forwarded-User`.
    proxies
        Addresses or networks of the proxy.
    role
        The role of a user that `roles` does not name; None refuses these users.
    roles
        The roles of users by name.
    """

    has_login = False

    def __init__(
        self,
        header: str,
        proxies: Sequence[str] = ("127.0.0.1", "::1"),
        role: Role | None = Role.VIEW,
        roles: Callable[[str], Role | None] = lambda name: None,
    ) -> None:
        self._variable = "HTTP_" + header.upper().replace("-", "_")
        try:
            self._proxies = [ipaddress.ip_network(each, strict=False) for each in proxies]
        except ValueError as error:
            raise ConfigError(f"the address of the proxy is wrong: {error}") from None
        self._role = role
        self._roles = roles

    def viewer(self, environ: Mapping[str, Any], session: Mapping[str, Any]) -> Viewer | None:
        name = str(environ.get(self._variable, "")).strip()
        if not name or not self._is_proxy(environ.get("REMOTE_ADDR")):
            return None
        role = self._roles(name) or self._role
        return None if role is None else Viewer.of(name, role)

    def _is_proxy(self, address: object) -> bool:
        try:
            peer = ipaddress.ip_address(str(address))
        except ValueError:
            return False
        return any(peer in network for network in self._proxies)


def derived_key(secret: str | bytes) -> str:
    """Return a key for the console's sessions, with which nobody can sign those of the host."""
    text = secret if isinstance(secret, bytes) else secret.encode()
    return hashlib.sha256(b"delaytasks console:" + text).hexdigest()
