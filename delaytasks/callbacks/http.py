"""HTTP callbacks: a task of the tag `delaytasks.callback` is a POST, and the status of the response
is its outcome.

The URL is checked when the callback is scheduled and when it is sent, and the addresses of its host
where a connection is made: it goes to one of the addresses that were checked. All else is HTTP with
the name, as any client speaks it, but with time limits that a hostile receiver cannot evade.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, NamedTuple

from requests import PreparedRequest, RequestException, Response
from requests.adapters import HTTPAdapter
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError
from urllib3.util.connection import create_connection

from delaytasks.callbacks.signatures import ID, SIGNATURE, TIMESTAMP, SigningKeys
from delaytasks.loops import within
from delaytasks.model.clock import UTC, Clock, monotonic, reset_in_child
from delaytasks.model.errors import ConfigError, ForbiddenURLError, InvalidInputError
from delaytasks.model.moves import Done, Fail, Outcome, Retry, RetrySchedule
from delaytasks.model.task import DelayedTask
from delaytasks.model.text import mask_url, one_line, shown
from delaytasks.settings import Settings

# -- The addresses that are allowed ---------------------------------------------------------------


Address = IPv4Address | IPv6Address
#: Returns the addresses of a host and a port.
Resolve = Callable[[str, int], list[str]]

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

    @property
    def url(self) -> str:
        """The URL, with the host in its canonical spelling."""
        return f"{self.scheme}://{self.host_and_port}{self.path}"


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

    def addresses(self, target: Target, limit_s: float) -> list[Address]:
        """Return the addresses of the host, after checking all of them.

        Raises `OSError` if the name has no address, or is not resolved within `limit_s`.
        """
        if target.literal is not None:
            return [target.literal]
        texts = within(limit_s, partial(self._resolve, target.host, target.port))
        addresses = [ip_address(text) for text in texts]
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
        raise ForbiddenURLError(f"a callback's URL is a string, not {type(url).__name__}", "url")
    match = _URL.fullmatch(url)
    if match is None:
        raise ForbiddenURLError(
            f"{shown(mask_url(url))} is not of the form https://host:port/path, in ASCII and "
            "without a user: write international names as xn--…, and other characters as %…",
            "url",
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
        raise ForbiddenURLError(f"{scheme}://{match['host']}: {error}", "url") from None


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
        "setting callback_allow allows a host or a network)",
        "url",
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


# -- Requests and responses -----------------------------------------------------------------------


#: A receiver may ask for a longer wait than the next retry delay, up to this.
MAX_RETRY_AFTER_S = 86400.0
#: The part of a response's body that is read. The connection of a longer response is closed.
MAX_RESPONSE_BYTES = 64 * 1024
#: The part of a response that is stored with a failed attempt.
MAX_QUOTED_CHARS = 500
_DEFAULT_HEADERS = {"Content-Type": "application/json", "User-Agent": "delaytasks"}
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")
#: Headers that frame the request, contain its destination, or describe the sender to the receiver.
_RESERVED_HEADERS = {
    "accept-encoding", "connection", "content-encoding", "content-length", "expect", "host",
    "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Callback:
    """The body of an HTTP callback. Another program may have written it."""

    url: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        headers = self.headers
        if not isinstance(headers, Mapping):
            raise InvalidInputError(
                f"headers are a mapping of strings, not {type(headers).__name__}", "headers"
            )
        for name, value in headers.items():
            if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
                raise InvalidInputError(f"{shown(name)} cannot be the name of a header", "headers")
            lowered = name.lower()
            if lowered in _RESERVED_HEADERS or lowered.startswith(("webhook-", "proxy-")):
                raise InvalidInputError(f"the header {name} is reserved for the sender", "headers")
            if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
                # The message does not contain the value, which may be a secret.
                raise InvalidInputError(
                    f"the header {name} has a value that is not a line of printable ASCII",
                    "headers",
                )
        if len({name.lower() for name in headers}) < len(headers):
            raise InvalidInputError("a header is given twice", "headers")


class HttpCallbacks:
    """Sends HTTP callbacks. Thread-safe: each process has connections of its own."""

    def __init__(self, settings: Settings, guard: Guard, clock: Clock) -> None:
        self._settings = settings
        self._guard = guard
        self._clock = clock
        self._keys = SigningKeys(settings.callback_secrets)
        self.after_fork()
        reset_in_child(self)

    def after_fork(self) -> None:
        self._lock = threading.Lock()
        self._made: Adapter | None = None

    def content(self, url: str, body: Any, headers: Mapping[str, str] | None) -> dict[str, Any]:
        """Return the body of a callback's task, after checking it."""
        self._guard.check(url)
        callback = Callback(url, body, headers or {})
        return {name: getattr(callback, name) for name in Callback.__slots__}

    def __call__(self, callback: Callback, task: DelayedTask) -> Outcome:
        payload = json.dumps(callback.body, separators=(",", ":")).encode()
        try:
            return self._post(self._guard.check(callback.url), callback.headers, payload, task)
        except ForbiddenURLError as error:
            # The settings may change, and so may the address of a name.
            return Retry(reason=f"forbidden: {error}")

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _post(
        self, target: Target, headers: Mapping[str, str], payload: bytes, task: DelayedTask
    ) -> Outcome:
        settings, adapter = self._settings, self._adapter()
        exchange = Exchange(self._guard, target, monotonic() + settings.callback_timeout_s)
        current.set(exchange)
        # The time limit of each step: look up the name, connect, negotiate TLS, send head and body.
        step_s = min(settings.callback_connect_s, settings.callback_timeout_s / 5)
        request = PreparedRequest()
        headers = {**_DEFAULT_HEADERS, **headers, **self._own_headers(payload, task)}
        try:
            request.prepare("POST", target.url, headers, data=payload)
            limits = step_s, settings.callback_read_s
            with closing(adapter.send(request, stream=True, timeout=limits)) as response:
                return self._outcome(response, task)
        except (RequestException, OSError) as error:
            cause = _first_cause(error)
            text = one_line(str(cause), MAX_QUOTED_CHARS)
            return Retry(reason=f"network: {type(cause).__name__} at {exchange.where}: {text}")

    def _own_headers(self, payload: bytes, task: DelayedTask) -> dict[str, str]:
        """Return the headers that identify, time and sign the callback.

        The id is the same in each attempt, so that the receiver can recognize a repetition.
        """
        id, timestamp = str(task.id), str(int(self._clock.now().timestamp()))
        headers = {"Accept-Encoding": "identity", ID: id, TIMESTAMP: timestamp}
        if self._keys:
            headers[SIGNATURE] = self._keys.sign(id, timestamp, payload)
        return headers

    def _adapter(self) -> Adapter:
        with self._lock:
            if self._made is None:
                self._made = Adapter()
            return self._made

    def _outcome(self, response: Response, task: DelayedTask) -> Outcome:
        """Return the outcome. It depends on the status alone, even if the body cannot be read."""
        status, quoted = response.status_code, _quoted(response)
        if 200 <= status < 300:
            return Done()
        reason = f"HTTP {status}"
        if 300 <= status < 400:
            location = one_line(response.headers.get("Location", "?"))
            reason += f", to {location}: redirects are not followed"
        if quoted:
            reason += f"\n{quoted}"
        if status == 410:
            return Fail(reason)
        return Retry(self._asked_wait_s(response, task) if status in (429, 503) else None, reason)

    def _asked_wait_s(self, response: Response, task: DelayedTask) -> float | None:
        """Return the wait of `Retry-After` if it is longer than the next retry delay, else None.

        Otherwise a receiver that always asks for one second would use up the retry schedule in some
        seconds.
        """
        asked = retry_after_s(response.headers.get("Retry-After", ""), self._clock.now())
        asked = min(asked, MAX_RETRY_AFTER_S, self._settings.max_delay_s)
        wait = (task.retry_schedule or RetrySchedule.NOTIFY).wait_s(task.runs)
        return asked if wait is not None and asked > wait else None


def retry_after_s(text: str, now: datetime) -> float:
    """Return the seconds from `now` in a `Retry-After` header, which has seconds or a date.

    urllib3's own parser has a limit of six hours in some of its versions.
    """
    if re.fullmatch("[0-9]{1,15}", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return max((when - now).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _quoted(response: Response) -> str:
    """Return the first part of a response on one line.

    A response that is read to its end leaves its connection to the next callback.
    """
    try:
        body = response.raw.read(MAX_RESPONSE_BYTES, decode_content=False)
    except (HTTPError, OSError):
        return ""
    return one_line(body[: 4 * MAX_QUOTED_CHARS].decode(errors="replace").strip(), MAX_QUOTED_CHARS)


def _first_cause(error: BaseException) -> BaseException:
    """Return the first error of a chain.

    The messages of the libraries' own errors quote the whole URL, which may contain secrets.
    """
    while (
        earlier := error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    ) is not None:
        error = earlier
    return error


# -- Connections to untrusted servers: to the address that was checked, and with time limits ------

#: The number of addresses to which connections stay open, and of open connections to each of them.
MAX_OPEN_CONNECTIONS = 100
#: A receiver may send this number of interim responses (status 1xx) before the final one.
MAX_INTERIM_RESPONSES = 10
#: Responses with these statuses end after their headers, whatever the headers announce.
_WITHOUT_BODY = (http.client.NO_CONTENT, http.client.NOT_MODIFIED)


@dataclass
class Exchange:
    """One request and its response."""

    guard: Guard
    target: Target
    #: The time at which the exchange must have ended.
    deadline: float
    #: The last address that a connection was made to; None if the exchange uses a kept connection.
    address: Address | None = None

    @property
    def where(self) -> str:
        """The receiver, for error messages."""
        address = "" if self.address is None else f" ({self.address})"
        return f"{self.target.host_and_port}{address}"


#: The exchange of this thread.
current: ContextVar[Exchange] = ContextVar("current")


def time_left_s(limit_s: float | None) -> float:
    """Return the time left for the current exchange, or `limit_s` if that is shorter."""
    left = current.get().deadline - monotonic()
    if left <= 0:
        raise TimeoutError("the request took too long")
    return left if limit_s is None else min(left, limit_s)


class _BoundedReader(io.RawIOBase):
    """Reads a socket until the exchange must have ended.

    The time left for the exchange limits each wait. A time limit for each wait alone would let a
    server that sends a byte from time to time continue forever.
    """

    def __init__(self, raw: io.RawIOBase, sock: socket.socket) -> None:
        self._raw = raw
        self.sock = sock
        self.is_over = False
        self._idle_s = sock.gettimeout()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if self.is_over:
            return None
        self.sock.settimeout(time_left_s(self._idle_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _ResponseReader(io.BufferedReader):
    """Reads one response.

    Bytes after the response's end may be in the buffer. They would be lost with the buffer, and the
    following bytes would be taken for the response to the next request. The socket is shut down
    then, so that it is not used again.
    """

    raw: _BoundedReader

    def close(self) -> None:
        if not self.closed:
            self.raw.is_over = True
            if self.peek():
                with suppress(OSError):
                    self.raw.sock.shutdown(socket.SHUT_RDWR)
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = _ResponseReader(_BoundedReader(self.fp.detach(), sock))

    def _read_status(self) -> tuple[str, int, str]:
        """Return the status line of the final response.

        `http.client` skips only status 100, and without a limit. Another interim response would be
        the result of this request, and the final response the result of the next request.
        """
        for _ in range(MAX_INTERIM_RESPONSES + 1):
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 100 <= status < 200 or status == http.client.SWITCHING_PROTOCOLS:
                return version, status, reason
            http.client.parse_headers(self.fp)
        raise http.client.HTTPException(
            f"more than {MAX_INTERIM_RESPONSES} interim responses (status 1xx)"
        )

    def begin(self) -> None:
        """Read the headers. A connection is used again only if they state in exactly one way where
        the response ends, and announce no body that the receiver may still send.
        """
        super().begin()
        codings, lengths = (
            self.headers.get_all(name, []) for name in ("Transfer-Encoding", "Content-Length")
        )
        if self.status in _WITHOUT_BODY:
            is_clear = not codings and lengths in ([], ["0"])
        elif codings:
            is_clear = [coding.lower() for coding in codings] == ["chunked"] and not lengths
        else:
            is_clear = not lengths or re.fullmatch("[0-9]{1,18}", ",".join(lengths)) is not None
        if not is_clear or self.status == http.client.SWITCHING_PROTOCOLS:
            self.will_close = True


class _Connection(HTTPConnection):
    """Connects to checked addresses only. Is used again only if nothing arrived after the last
    response, not even inside TLS.
    """

    response_class = _Response

    def _new_conn(self) -> socket.socket:
        exchange, failed = current.get(), OSError("the name has no address")
        for address in exchange.guard.addresses(exchange.target, time_left_s(self.timeout)):
            exchange.address = address
            try:
                return create_connection(
                    (str(address), exchange.target.port),
                    time_left_s(self.timeout),
                    socket_options=self.socket_options,
                )
            except OSError as error:
                failed = error
        raise failed

    @property
    def is_connected(self) -> bool:
        has_more = isinstance(self.sock, ssl.SSLSocket) and self.sock.pending() > 0
        return not has_more and super().is_connected


class _TLSConnection(_Connection, HTTPSConnection): ...


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TLSPool(HTTPSConnectionPool):
    ConnectionCls = _TLSConnection


def tls_context() -> ssl.SSLContext:
    """Return the context with the certificate authorities of callbacks."""
    ca_file = os.environ.get("SSL_CERT_FILE") or DEFAULT_CA_BUNDLE_PATH
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(
            f"SSL_CERT_FILE = {shown(ca_file)} cannot be read ({error}): name a PEM file of the "
            "certificate authorities that HTTP callbacks trust, or unset it"
        ) from None


class Adapter(HTTPAdapter):
    """The open connections of a process.

    It is used without a `requests.Session`, which would add cookies, .netrc and the environment's
    proxies, and read redirects to their end.
    """

    def __init__(self) -> None:
        # All connections share it: reading the certificate authorities takes as long as 40
        # callbacks.
        self._tls = tls_context()
        super().__init__(pool_connections=MAX_OPEN_CONNECTIONS, pool_maxsize=MAX_OPEN_CONNECTIONS)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TLSPool}

    def build_connection_pool_key_attributes(
        self, request: PreparedRequest, verify: Any, cert: Any = None
    ) -> Any:
        host, _ = super().build_connection_pool_key_attributes(request, verify, cert)
        return host, {"ssl_context": self._tls} if host["scheme"] == "https" else {}

    def cert_verify(self, *_: Any) -> None:
        """Do nothing: the TLS context has the certificate authorities."""
