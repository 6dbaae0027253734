"""The addresses to which callbacks may go: public ones by https, and those in `callback_allow`.

The URL is checked when the callback is scheduled, and the address of its host when the callback is
sent. The connection goes to the address that was checked, so that a later change of the name has no
effect.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple

from delaytasks.core.clock import monotonic, reset_in_child
from delaytasks.core.errors import ConfigError, ForbiddenURLError
from delaytasks.core.loop import within
from delaytasks.core.text import mask_url, shown

Address = IPv4Address | IPv6Address
#: Returns the addresses of a host and a port.
Resolve = Callable[[str, int], list[str]]
#: Scheme, host and port.
Endpoint = tuple[str, str, int]

#: The addresses of a name are used for this time, which limits the load of the name server.
RESOLVED_FOR_S = 5.0
#: The number of names whose addresses are kept.
MAX_RESOLVED = 1000

DEFAULT_PORTS = {"http": 80, "https": 443}
#: IANA's registry of special addresses. Python's `is_global` differs between versions.
_SPECIAL_V4 = [
    ip_network(network)
    for network in (
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 "
        "192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 "
        "224.0.0.0/4 240.0.0.0/4"
    ).split()
]
#: All other addresses are loopback, private, link-local or multicast, or contain an IPv4 address
#: (::ffff:0:0/96, 64:ff9b::/96).
_PUBLIC_V6 = IPv6Network("2000::/3")
#: Special parts of it. Addresses of Teredo and 6to4 contain an IPv4 address.
_SPECIAL_V6 = [
    ip_network(network) for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]

_HOST = r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+"
_HOST_AND_PORT = re.compile(rf"(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?")
#: Stricter than the standard for URLs, so that all programs read the same host in a URL.
_URL = re.compile(rf"(?P<scheme>(?i:https?))://{_HOST_AND_PORT.pattern}(?P<path>[/?][\x21-\x7e]*)?")
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
#: The last part of forms that some programs accept as IPv4 addresses: 127.1, 0x7f.1, 2130706433.
_NUMBER = re.compile("[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL."""

    scheme: str
    host: str
    port: int
    path: str
    #: The address, if the URL has an address instead of a name.
    literal: Address | None

    @property
    def host_and_port(self) -> str:
        """The host as in a `Host` header, without the scheme's default port."""
        return self.host if self.port == DEFAULT_PORTS[self.scheme] else f"{self.host}:{self.port}"

    def url_at(self, address: Address) -> str:
        """Return the URL with `address` instead of its host."""
        return f"{self.scheme}://{_bracketed(address)}:{self.port}{self.path}"


class _Allowed(NamedTuple):
    """An entry of `callback_allow`: a name or a network, and a port if it is limited to one."""

    name: str | None
    network: IPv4Network | IPv6Network | None
    port: int | None


def resolve(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Guard:
    """Decides which URLs and addresses callbacks may go to."""

    def __init__(self, allow: Iterable[str], resolve: Resolve = resolve) -> None:
        self._allowed = [_allowed_entry(entry) for entry in allow]
        self._resolve = resolve
        #: By endpoint: until when its addresses are used, and the addresses.
        self._resolved: dict[Endpoint, tuple[float, list[Address]]] = {}
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._locks: dict[Endpoint, threading.Lock] = {}

    def check(self, url: object) -> Target:
        """Return the parts of `url`, or raise `ForbiddenURLError`, without resolving its name."""
        target = _parse(url)
        if target.literal is not None:
            self._check_address(target, target.literal)
        elif not any(
            allowed.network or allowed.name == target.host
            for allowed in self._allowed_on(target.port)
        ):
            if target.scheme != "https":
                raise _forbidden(target, "is not https")
            if "." not in target.host or target.host.endswith(".localhost"):
                raise _forbidden(target, "is not a public name")
        return target

    def address(self, target: Target, turn: int, limit_s: float) -> Address:
        """Return the address to connect to, after checking it.

        If the name has several addresses, the attempt number `turn` selects one. Raises `OSError`
        if the name has no address, or is not resolved within `limit_s`.
        """
        if target.literal is not None:
            return target.literal
        endpoint = (target.scheme, target.host, target.port)
        addresses = self._kept(endpoint)
        if addresses is None:
            # If several callbacks need the same name, one of them resolves it, and the others wait.
            lock = self._locks.setdefault(endpoint, threading.Lock())
            if not lock.acquire(timeout=limit_s):
                raise TimeoutError(f"no answer within {limit_s:g} s")
            try:
                addresses = self._kept(endpoint) or self._resolve_checked(target, limit_s)
                if len(self._resolved) >= MAX_RESOLVED:
                    self._resolved.clear()
                    self._locks.clear()
                self._resolved[endpoint] = monotonic() + RESOLVED_FOR_S, addresses
            finally:
                lock.release()
        return addresses[turn % len(addresses)]

    def _kept(self, endpoint: Endpoint) -> list[Address] | None:
        until, addresses = self._resolved.get(endpoint, (0.0, []))
        return addresses if monotonic() < until else None

    def _resolve_checked(self, target: Target, limit_s: float) -> list[Address]:
        work = partial(self._resolve, target.host, target.port)
        addresses = [ip_address(text) for text in within(limit_s, work)]
        for address in addresses:
            self._check_address(target, address)
        return addresses

    def _check_address(self, target: Target, address: Address) -> None:
        for allowed in self._allowed_on(target.port):
            if allowed.name == target.host or (
                allowed.network is not None and address in allowed.network
            ):
                return
        if not _is_public(address):
            means = "" if address == target.literal else f" (now {address})"
            raise _forbidden(target, f"is not a public address{means}")
        if target.scheme != "https":
            raise _forbidden(target, "is not https")

    def _allowed_on(self, port: int) -> list[_Allowed]:
        return [allowed for allowed in self._allowed if allowed.port in (None, port)]


def _is_public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    return address in _PUBLIC_V6 and not any(address in network for network in _SPECIAL_V6)


def _parse(url: object) -> Target:
    if not isinstance(url, str):
        raise ForbiddenURLError(f"a callback's URL is a string, not {type(url).__name__}")
    match = _URL.fullmatch(url)
    if match is None:
        raise ForbiddenURLError(
            f"{shown(mask_url(url))} is not of the form https://host:port/path, in ASCII and "
            "without a user: write international names as xn--…, and other characters as %…"
        )
    try:
        scheme = match["scheme"].lower()
        host, literal = _host(match["host"])
        return Target(
            scheme,
            host,
            _port(match["port"]) or DEFAULT_PORTS[scheme],
            match["path"] or "/",
            literal,
        )
    except ValueError as error:
        raise ForbiddenURLError(f"{scheme}://{match['host']}: {error}") from None


def _host(text: str) -> tuple[str, Address | None]:
    """Return a host in its canonical spelling, and its address if it is one."""
    host = text.lower()
    if host.startswith("["):
        address: Address = IPv6Address(host[1:-1])
        return _bracketed(address), address
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        address = IPv4Address(host)
        return str(address), address
    if not _NAME.fullmatch(host):
        raise ValueError("the host is not a name")
    return host, None


def _port(text: str | None) -> int | None:
    if text is not None and not 0 < int(text) < 65536:
        raise ValueError(f"there is no port {text}")
    return None if text is None else int(text)


def _bracketed(address: Address) -> str:
    return str(address) if isinstance(address, IPv4Address) else f"[{address}]"


def _forbidden(target: Target, fact: str) -> ForbiddenURLError:
    return ForbiddenURLError(
        f"callbacks may not go to {target.scheme}://{target.host_and_port}, which {fact} (the "
        "setting callback_allow allows a host or a network)"
    )


def _allowed_entry(entry: str) -> _Allowed:
    try:
        return _Allowed(None, ip_network(entry), None)
    except ValueError:
        pass  # the entry has a port, or is a name
    match = _HOST_AND_PORT.fullmatch(entry)
    try:
        if match is not None:
            host, literal = _host(match["host"])
            return _Allowed(
                None if literal else host,
                ip_network(literal) if literal else None,
                _port(match["port"]),
            )
    except ValueError:
        pass  # reported below
    raise ConfigError(
        f"delaytasks_callback_allow: {shown(entry)} is not a host, host:port, address, "
        "address:port or network (10.1.0.0/16)"
    )
