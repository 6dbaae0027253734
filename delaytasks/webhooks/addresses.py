"""Where callbacks may go: to public addresses by https, and wherever the setting `callback_allow` says.

What a URL says is checked when it is scheduled, and what its host's name means when it is called. The address that was
checked is the one that is connected to, so a name that means another address a moment later leads nowhere.
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

from delaytasks.core.bounded_calls import within
from delaytasks.core.clock import monotonic
from delaytasks.core.errors import ConfigError, ForbiddenURLError
from delaytasks.core.forks import reset_in_child
from delaytasks.core.masking import mask_url
from delaytasks.core.text import shown

Address = IPv4Address | IPv6Address
#: The addresses of a host; the one place where names are looked up.
Resolve = Callable[[str, int], list[str]]
#: Scheme, host and port.
DatabaseAddress = tuple[str, str, int]

#: A name is looked up no more often: thousands of callbacks to one host are no load for the name server.
KNOWN_S = 5.0
KNOWN_MAX = 1000

PORTS = {"http": 80, "https": 443}
#: The registries of special addresses of IANA, written out: what Python takes for global differs by its version.
_SPECIAL_V4 = [
    ip_network(network)
    for network in (
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
        "192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4"
    ).split()
]
#: All others are loopback, private, link-local, multicast, or say an IPv4 address (::ffff:0:0/96, 64:ff9b::/96).
_PUBLIC_V6 = IPv6Network("2000::/3")
#: Teredo and 6to4 say IPv4 addresses, too.
_SPECIAL_V6 = [
    ip_network(network) for network in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
]

_HOST = r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+"
_PLACE = re.compile(rf"(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?")
#: Narrower than what URLs may be, so that no two programs can read two hosts in one of them.
_URL = re.compile(rf"(?P<scheme>(?i:https?))://{_PLACE.pattern}(?P<path>[/?][\x21-\x7e]*)?")
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
#: The last part of what some programs take for an IPv4 address: 127.1, 0x7f.1, 2130706433.
_NUMBER = re.compile("[0-9]+|0x[0-9a-f]*")


@dataclass(frozen=True, slots=True)
class Target:
    """What a URL says."""

    scheme: str
    host: str
    port: int
    path: str
    #: If the host is no name.
    literal: Address | None

    @property
    def place(self) -> str:
        """The host, as a Host header and messages have it."""
        return self.host if self.port == PORTS[self.scheme] else f"{self.host}:{self.port}"

    def at(self, address: Address) -> str:
        """The URL with an address in the place of its host."""
        return f"{self.scheme}://{_bracketed(address)}:{self.port}{self.path}"


class _Opening(NamedTuple):
    """What `callback_allow` opens: a host by its name, or a network; perhaps on one port only."""

    name: str | None
    network: IPv4Network | IPv6Network | None
    port: int | None


def resolve(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Guard:
    def __init__(self, allow: Iterable[str], resolve: Resolve = resolve) -> None:
        self._openings = [_opening(entry) for entry in allow]
        self._resolve = resolve
        #: Until when, and what was found.
        self._known: dict[DatabaseAddress, tuple[float, list[Address]]] = {}
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._looking: dict[DatabaseAddress, threading.Lock] = {}

    def check(self, url: object) -> Target:
        """What can be said without looking the name up."""
        target = _parse(url)
        if target.literal is not None:
            self._check_address(target, target.literal)
        elif not any(
            opening.network or opening.name == target.host
            for opening in self._openings_on(target.port)
        ):
            if target.scheme != "https":
                raise _forbidden(target, "is not https")
            if "." not in target.host or target.host.endswith(".localhost"):
                raise _forbidden(target, "is no public name")
        return target

    def address(self, target: Target, turn: int, limit_s: float) -> Address:
        """The address to connect to, checked: that of each turn, where the name has several. `OSError` if it has none,
        or it can not be looked up within the limit."""
        if target.literal is not None:
            return target.literal
        place = (target.scheme, target.host, target.port)
        addresses = self._still_known(place)
        if addresses is None:
            # Many callbacks may want the same name: one of them looks it up, the others wait for it.
            looking = self._looking.setdefault(place, threading.Lock())
            if not looking.acquire(timeout=limit_s):
                raise TimeoutError(f"no answer within {limit_s:g} s")
            try:
                addresses = self._still_known(place) or self._look_up(target, limit_s)
                if len(self._known) >= KNOWN_MAX:
                    self._known.clear()
                    self._looking.clear()
                self._known[place] = monotonic() + KNOWN_S, addresses
            finally:
                looking.release()
        return addresses[turn % len(addresses)]

    def _still_known(self, place: DatabaseAddress) -> list[Address] | None:
        until, addresses = self._known.get(place, (0.0, []))
        return addresses if monotonic() < until else None

    def _look_up(self, target: Target, limit_s: float) -> list[Address]:
        work = partial(self._resolve, target.host, target.port)
        addresses = [ip_address(text) for text in within(limit_s, work)]
        for address in addresses:
            self._check_address(target, address)
        return addresses

    def _check_address(self, target: Target, address: Address) -> None:
        for opening in self._openings_on(target.port):
            if opening.name == target.host or (
                opening.network is not None and address in opening.network
            ):
                return
        if not _is_public(address):
            means = "" if address == target.literal else f" (now {address})"
            raise _forbidden(target, f"is no public address{means}")
        if target.scheme != "https":
            raise _forbidden(target, "is not https")

    def _openings_on(self, port: int) -> list[_Opening]:
        return [opening for opening in self._openings if opening.port in (None, port)]


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
            f"{shown(mask_url(url))} is not of the form https://host:port/path, in ASCII and without a user: write "
            "international names as xn--…, and other characters as %…"
        )
    try:
        scheme = match["scheme"].lower()
        host, literal = _host(match["host"])
        return Target(
            scheme, host, _port(match["port"]) or PORTS[scheme], match["path"] or "/", literal
        )
    except ValueError as error:
        raise ForbiddenURLError(f"{scheme}://{match['host']}: {error}") from None


def _host(text: str) -> tuple[str, Address | None]:
    """A host in its one spelling, and the address that it is."""
    host = text.lower()
    if host.startswith("["):
        address: Address = IPv6Address(host[1:-1])
        return _bracketed(address), address
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        address = IPv4Address(host)
        return str(address), address
    if not _NAME.fullmatch(host):
        raise ValueError("the host is no name")
    return host, None


def _port(text: str | None) -> int | None:
    if text is not None and not 0 < int(text) < 65536:
        raise ValueError(f"there is no port {text}")
    return None if text is None else int(text)


def _bracketed(address: Address) -> str:
    return str(address) if isinstance(address, IPv4Address) else f"[{address}]"


def _forbidden(target: Target, fact: str) -> ForbiddenURLError:
    return ForbiddenURLError(
        f"callbacks may not go to {target.scheme}://{target.place}, which {fact} (setting callback_allow opens a host "
        "or network)"
    )


def _opening(entry: str) -> _Opening:
    try:
        return _Opening(None, ip_network(entry), None)
    except ValueError:
        pass  # it has a port, or is a name
    match = _PLACE.fullmatch(entry)
    try:
        if match is not None:
            host, literal = _host(match["host"])
            return _Opening(
                None if literal else host,
                ip_network(literal) if literal else None,
                _port(match["port"]),
            )
    except ValueError:
        pass  # said below
    raise ConfigError(
        f"delaytasks_callback_allow: {shown(entry)} is none of host, host:port, address, address:port and network "
        "(10.1.0.0/16)"
    )
