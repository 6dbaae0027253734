"""Callbacks to other systems: HTTP requests and messages to queues, as `delays.callbacks`.

A task of the tag `delaytasks.message` sends a message to a queue or an exchange. One of the tag
`delaytasks.callback` is a POST, and the status of the response is its outcome.

The URL is checked when the callback is scheduled and when it is sent, and the addresses of its host
where a connection is made: it goes to one of the addresses that were checked. All else is HTTP with
the name, as `http.client` speaks it, but with time limits that a hostile receiver cannot evade.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property, partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Any, NamedTuple

from kombu import Connection
from requests.utils import DEFAULT_CA_BUNDLE_PATH

from delaytasks.broker.link import Outgoing
from delaytasks.callbacks.signatures import ID, SIGNATURE, TIMESTAMP, SigningKeys
from delaytasks.loops import CallGroup, twin, within
from delaytasks.model.clock import UTC, Clock, monotonic
from delaytasks.model.errors import ConfigError, ForbiddenURLError, InvalidInputError
from delaytasks.model.inputs import CALLBACK, MESSAGE, Delay
from delaytasks.model.moves import Done, Fail, Outcome, Retry, RetrySchedule
from delaytasks.model.task import DelayedTask, NewTask
from delaytasks.model.text import mask_url, one_line, shown
from delaytasks.settings import Settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from delaytasks.model.task import OnConflict, TaskOptions
    from delaytasks.runtime import Runtime


class CallbackCalls(CallGroup):
    """Callbacks to other systems, as `delays.callbacks`.

    Each method has an asynchronous twin for coroutines, such as `apost` for `post`.

    Examples
    --------
    >>> delays.callbacks.post("https://partner.example/paid", {"order": 7}, 60)
    >>> delays.callbacks.publish("invoices", {"order": 7}, 60)
    """

    def post(
        self,
        url: str,
        body: Any,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        headers: Mapping[str, str] | None = None,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> DelayedTask:
        """Schedule a POST of `body` as JSON to `url`, repeated until the answer is 2xx.

        An attempt that fails is retried by `RetrySchedule.NOTIFY`, unless `retries` is given. The
        answer 410 ends the task.

        Parameters
        ----------
        url
            An https URL of a public host, or a URL that the setting `callback_allow` allows.
        body
            Any value that JSON can represent.
        delay
            Seconds, text such as `"30m"`, or a timedelta.
        at
            An aware datetime, instead of `delay`.
        headers
            Additional HTTP headers.
        on_conflict, session, **options
            See `DelayTasks.schedule_delay`. All callbacks share one set of keys.

        Returns
        -------
        DelayedTask
            The task as it is stored.

        Raises
        ------
        ForbiddenURLError
            If callbacks may not go to the URL.
        DelayTaskError
            The errors of `DelayTasks.schedule_delay`.

        Examples
        --------
        >>> delays.callbacks.post("https://partner.example/paid", {"order": 7}, 60)
        """
        content = self._runtime.http_callbacks.content(url, body, headers)
        return self._schedule(
            NewTask(CALLBACK, content, delay, at, **options), on_conflict, session
        )

    apost = twin(post)

    def publish(
        self,
        to: str,
        body: Any,
        delay: Delay | None = None,
        *,
        at: datetime | None = None,
        exchange: str = "",
        headers: Mapping[str, str | int | float | bool] | None = None,
        on_conflict: OnConflict = "reject",
        session: Any = None,
        **options: Unpack[TaskOptions],
    ) -> DelayedTask:
        """Schedule a message to a broker queue, repeated until the broker has accepted it.

        Parameters
        ----------
        to
            The queue, or with `exchange` the routing key.
        body, delay, at
            See `post`.
        exchange
            An AMQP exchange. By default the message goes directly to the queue.
        headers
            Message headers.
        on_conflict, session, **options
            See `DelayTasks.schedule_delay`; `queue` is the queue of the task itself. All messages
            share one set of keys.

        Returns
        -------
        DelayedTask
            The task as it is stored.

        Raises
        ------
        DelayTaskError
            The errors of `DelayTasks.schedule_delay`.

        See Also
        --------
        The setting `callback_broker_url` names another broker than that of the Celery app.

        Examples
        --------
        >>> delays.callbacks.publish("invoices", {"order": 7}, 60)
        """
        content = vars(Message(to, body, exchange, headers or {}))
        return self._schedule(NewTask(MESSAGE, content, delay, at, **options), on_conflict, session)

    apublish = twin(publish)

    def _schedule(self, new: NewTask, on_conflict: OnConflict, session: Any) -> DelayedTask:
        runtime = self._runtime
        return runtime.producer.schedule(new, on_conflict, runtime.transactions.of(session))


# -- Callbacks to queues --------------------------------------------------------------------------

#: The longest name of a queue or an exchange. This is the limit of AMQP's short strings.
MAX_NAME_BYTES = 255


@dataclass(frozen=True)
class Message:
    """The body of a message to a queue. Another program may have written it."""

    #: The name of a queue; with an exchange the routing key.
    to: str
    body: Any = None
    exchange: str = ""
    headers: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for argument, name in (("exchange", self.exchange), ("to", self.to)):
            is_name = isinstance(name, str) and name.isprintable()
            if not is_name or len(name.encode()) > MAX_NAME_BYTES:
                raise InvalidInputError(
                    f"{argument} has at most {MAX_NAME_BYTES} printable bytes, not {shown(name)}",
                    argument,
                )
        if not (self.to or self.exchange):
            rule = "a message goes to a queue or an exchange, and neither is named"
            raise InvalidInputError(rule, "to")
        if not isinstance(self.headers, Mapping):
            rule = f"headers are a mapping, not {type(self.headers).__name__}"
            raise InvalidInputError(rule, "headers")


def send_message(runtime: Runtime, message: Message, task: DelayedTask) -> Outcome:
    """Send a message, and wait for the broker's confirmation.

    Raises the transport's exception if the broker refuses the message, does not confirm it, or has
    no queue for it.
    """
    if message.exchange:
        url = runtime.settings.callback_broker_url
        transport = (Connection(url) if url else runtime.celery.connection_for_write()).transport
        if transport.driver_type != "amqp":
            driver = transport.driver_name
            return Fail(f"{driver} has no exchanges: on it a message goes to a queue")
    outgoing = Outgoing(
        json.dumps(message.body, separators=(",", ":")),
        {
            "exchange": message.exchange,
            "routing_key": message.to,
            "headers": dict(message.headers),
            "content_type": "application/json",
            "content_encoding": "utf-8",
            "delivery_mode": 2,
            "message_id": str(task.id),
            # Otherwise the broker drops and confirms a message for which there is no queue.
            "mandatory": True,
        },
    )
    [error] = runtime.queue_links.publish([outgoing])
    if error is not None:
        raise error
    return Done()


# -- The addresses that are allowed ---------------------------------------------------------------


Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
#: Returns the addresses of a host and a port.
Resolve = Callable[[str, int], list[str]]

DEFAULT_PORTS = {"http": 80, "https": 443}
#: IANA's registries of special addresses. Python's `is_global` differs between versions. In IPv6,
#: all addresses outside 2000::/3 are loopback, private, link-local or multicast, or contain an IPv4
#: address (::ffff:0:0/96, 64:ff9b::/96); so do those of Teredo and 6to4, which are inside.
_SPECIAL = [
    ip_network(network)
    for network in (
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 "
        "192.0.2.0/24 192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 "
        "224.0.0.0/4 240.0.0.0/4 "
        "::/3 4000::/2 8000::/1 2001::/23 2001:db8::/32 2002::/16 3fff::/20"
    ).split()
]

_HOST = r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+"
_HOST_AND_PORT = re.compile(rf"(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?")
#: Stricter than the standard for URLs, so that all programs read the same host in a URL.
_URL = re.compile(rf"(?P<scheme>(?i:https?))://{_HOST_AND_PORT.pattern}(?P<path>[/?][\x21-\x7e]*)?")
_LABEL = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*")
#: The last part of forms that some programs accept as IPv4 addresses: 127.1, 0x7f.1, 2130706433.
_NUMBER = re.compile("[0-9]+|0x[0-9a-f]*")


class Target(NamedTuple):
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


def resolve(host: str, port: int) -> list[str]:
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class Guard:
    """Decides which URLs and addresses callbacks may go to."""

    def __init__(self, allow: Iterable[str], resolve: Resolve = resolve) -> None:
        self._allowed = [_allowed(entry) for entry in allow]
        self._resolve = resolve

    def check(self, url: object) -> Target:
        """Return the parts of `url`, or raise `ForbiddenURLError`, without resolving its name."""
        target = _parse(url)
        self._check(target, target.literal)
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
            self._check(target, address)
        return addresses

    def _check(self, target: Target, address: Address | None) -> None:
        """Raise `ForbiddenURLError` if callbacks may not go there.

        Without an address, a name may be one that resolves into an allowed network.
        """
        for place, port in self._allowed:
            if port in (None, target.port) and (
                place == target.host
                if isinstance(place, str)
                else address is None or address in place
            ):
                return
        if address is None and ("." not in target.host or target.host.endswith(".localhost")):
            fact = "is not a public name"
        elif address is not None and any(address in network for network in _SPECIAL):
            now = "" if address == target.literal else f" (now {address})"
            fact = f"is not a public address{now}"
        elif target.scheme != "https":
            fact = "is not https"
        else:
            return
        raise ForbiddenURLError(
            f"callbacks may not go to {target.scheme}://{target.host_and_port}, which {fact} (the "
            "setting callback_allow allows a host or a network)",
            "url",
        )


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
    scheme = match["scheme"].lower()
    try:
        host, literal, port = _place(match)
    except ValueError as error:
        raise ForbiddenURLError(f"{scheme}://{match['host']}: {error}", "url") from None
    path = (match["path"] or "/").partition("#")[0]
    path = path if path.startswith("/") else f"/{path}"
    return Target(scheme, host, port or DEFAULT_PORTS[scheme], path, literal)


def _place(match: re.Match[str]) -> tuple[str, Address | None, int | None]:
    """Return the host in its canonical spelling, its address if it is one, and the port.

    Raises `ValueError` if there is no such host or port.
    """
    host, port = match["host"].lower(), None
    if match["port"] is not None and not 0 < (port := int(match["port"])) < 65536:
        raise ValueError(f"there is no port {port}")
    if host.startswith("["):
        address = IPv6Address(host[1:-1])
        return f"[{address}]", address, port
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        return host, IPv4Address(host), port
    if not _NAME.fullmatch(host):
        raise ValueError("the host is not a name")
    return host, None, port


def _allowed(entry: str) -> tuple[str | Network, int | None]:
    """Return the name or the network, and perhaps the port, of an entry of `callback_allow`."""
    with suppress(ValueError):
        return ip_network(entry), None
    match = _HOST_AND_PORT.fullmatch(entry)
    with suppress(ValueError):
        if match is not None:
            host, literal, port = _place(match)
            return host if literal is None else ip_network(literal), port
    raise ConfigError(
        f"delaytasks_callback_allow: {shown(entry)} is not a host, host:port, address, "
        "address:port or network (10.1.0.0/16)"
    )


# -- Requests and responses -----------------------------------------------------------------------


#: A receiver may ask for a longer wait than the next retry delay, up to this.
MAX_RETRY_AFTER_S = 86400.0
#: The part of a response's body that is read. The connection of a longer response is closed.
MAX_BODY_BYTES = 64 * 1024
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


@dataclass(frozen=True)
class Callback:
    """The body of an HTTP callback. Another program may have written it."""

    url: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        headers = self.headers
        if not isinstance(headers, Mapping):
            rule = f"headers are a mapping of strings, not {type(headers).__name__}"
            raise InvalidInputError(rule, "headers")
        if len({str(name).lower() for name in headers}) < len(headers):
            raise InvalidInputError("a header is given twice", "headers")
        for name, value in headers.items():
            if (
                not isinstance(name, str)
                or not _HEADER_NAME.fullmatch(name)
                or name.lower() in _RESERVED_HEADERS
                or name.lower().startswith(("webhook-", "proxy-"))
            ):
                raise InvalidInputError(f"{shown(name)} cannot be set as a header", "headers")
            if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
                # The message does not contain the value, which may be a secret.
                raise InvalidInputError(
                    f"the header {name} has a value that is not a line of printable ASCII",
                    "headers",
                )


class HttpCallbacks:
    """Sends HTTP callbacks. Thread-safe. Each callback has a connection of its own."""

    def __init__(self, settings: Settings, guard: Guard, clock: Clock) -> None:
        self._settings = settings
        self._guard = guard
        self._clock = clock
        self._keys = SigningKeys(settings.callback_secrets)

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        # All connections share it: reading the certificate authorities takes as long as 40
        # callbacks.
        ca_file = os.environ.get("SSL_CERT_FILE") or DEFAULT_CA_BUNDLE_PATH
        try:
            return ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            raise ConfigError(
                f"SSL_CERT_FILE = {shown(ca_file)} cannot be read ({error}): name a PEM file of "
                "the certificate authorities that HTTP callbacks trust, or unset it"
            ) from None

    def content(self, url: str, body: Any, headers: Mapping[str, str] | None) -> dict[str, Any]:
        """Return the body of a callback's task, after checking it."""
        self._guard.check(url)
        return vars(Callback(url, body, headers or {}))

    def __call__(self, callback: Callback, task: DelayedTask) -> Outcome:
        payload = json.dumps(callback.body, separators=(",", ":")).encode()
        try:
            target = self._guard.check(callback.url)
            headers = self._headers(target, callback.headers, payload, task)
            return self._post(target, headers, payload, task)
        except ForbiddenURLError as error:
            # The settings may change, and so may the address of a name.
            return Retry(reason=f"forbidden: {error}")

    def _post(
        self, target: Target, headers: Mapping[str, str], payload: bytes, task: DelayedTask
    ) -> Outcome:
        settings, where, name = self._settings, target.host_and_port, target.host.strip("[]")
        tls = self._tls if target.scheme == "https" else None
        # The time limit of each step: look up the name, connect, negotiate TLS, send head and body.
        step_s = min(settings.callback_connect_s, settings.callback_timeout_s / 5)
        until = monotonic() + settings.callback_timeout_s
        try:
            failed = OSError("the name has no address")
            for address in self._guard.addresses(target, time_left_s(until, step_s)):
                where = f"{target.host_and_port} ({address})"
                try:
                    place = str(address), target.port
                    sock = socket.create_connection(place, time_left_s(until, step_s))
                    break
                except OSError as error:
                    failed = error
            else:
                raise failed
            with sock if tls is None else tls.wrap_socket(sock, server_hostname=name) as sock:
                # The head and the body are sent one after the other.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = http.client.HTTPConnection(target.host)
                connection.sock = sock
                connection.request("POST", target.path, payload, headers)
                reader: Any = _BoundedReader(sock, until, settings.callback_read_s)
                with _Response(reader, method="POST") as response:
                    response.begin()
                    return self._outcome(response, task)
        except (http.client.HTTPException, OSError) as error:
            text = one_line(str(error), MAX_QUOTED_CHARS)
            return Retry(reason=f"network: {type(error).__name__} at {where}: {text}")

    def _headers(
        self, target: Target, given: Mapping[str, str], payload: bytes, task: DelayedTask
    ) -> dict[str, str]:
        """Return the headers, of which our own ones identify, time and sign the callback.

        The id is the same in each attempt, so that the receiver can recognize a repetition.
        """
        names = {name.lower() for name in given}
        usual = {name: text for name, text in _DEFAULT_HEADERS.items() if name.lower() not in names}
        id, timestamp = str(task.id), str(int(self._clock.now().timestamp()))
        own = {"Host": target.host_and_port, "Connection": "close", ID: id, TIMESTAMP: timestamp}
        if self._keys:
            own[SIGNATURE] = self._keys.sign(id, timestamp, payload)
        return {**usual, **given, **own}

    def _outcome(self, response: http.client.HTTPResponse, task: DelayedTask) -> Outcome:
        """Return the outcome. It depends on the status alone, even if the body cannot be read."""
        status, body = response.status, b""
        # A chunk of a negative size, for example, raises a ValueError.
        with suppress(http.client.HTTPException, OSError, ValueError):
            body = response.read(MAX_BODY_BYTES)
        if 200 <= status < 300:
            return Done()
        reason = f"HTTP {status}"
        if 300 <= status < 400:
            location = one_line(response.headers.get("Location", "?"))
            reason += f", to {location}: redirects are not followed"
        text = body[: 4 * MAX_QUOTED_CHARS].decode(errors="replace").strip()
        if text:
            reason += f"\n{one_line(text, MAX_QUOTED_CHARS)}"
        if status == 410:
            return Fail(reason)
        return Retry(self._asked_wait_s(response, task) if status in (429, 503) else None, reason)

    def _asked_wait_s(self, response: http.client.HTTPResponse, task: DelayedTask) -> float | None:
        """Return the wait of `Retry-After` if it is longer than the next retry delay, else None.

        Otherwise a receiver that always asks for one second would use up the retry schedule in some
        seconds.
        """
        asked = retry_after_s(response.headers.get("Retry-After", ""), self._clock.now())
        asked = min(asked, MAX_RETRY_AFTER_S)
        wait = (task.retry_schedule or RetrySchedule.NOTIFY).wait_s(task.runs)
        return asked if wait is not None and asked > wait else None


def retry_after_s(text: str, now: datetime) -> float:
    """Return the seconds from `now` in a `Retry-After` header, which has seconds or a date."""
    if re.fullmatch("[0-9]{1,15}", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        return max((when - now).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return 0.0


# -- Responses of untrusted servers, which are read with limits of time and size ------------------


def time_left_s(until: float, limit_s: float) -> float:
    """Return the time that is left for a callback, or `limit_s` if that is shorter."""
    left = until - monotonic()
    if left <= 0:
        raise TimeoutError("the request took too long")
    return min(left, limit_s)


class _BoundedReader(io.RawIOBase):
    """Reads a socket until a time, and a limited number of bytes, for an `HTTPResponse`.

    The time that is left limits each wait. A time limit for each wait alone would let a server that
    sends a byte from time to time continue forever.
    """

    def __init__(self, sock: socket.socket, until: float, idle_s: float) -> None:
        self._sock, self._until, self._idle_s = sock, until, idle_s
        self._bytes_left = 2 * MAX_BODY_BYTES  # of the head and the body

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._sock.settimeout(time_left_s(self._until, self._idle_s))
        count = self._sock.recv_into(buffer)
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise http.client.HTTPException("the response is too long")
        return count


class _Response(http.client.HTTPResponse):
    def _read_status(self) -> tuple[str, int, str]:
        """Return the status line of the final response.

        `http.client` skips only status 100 of the interim ones (1xx). The limits of the reader end
        a response that has no other.
        """
        while True:
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 100 <= status < 200 or status == http.client.SWITCHING_PROTOCOLS:
                return version, status, reason
            http.client.parse_headers(self.fp)
