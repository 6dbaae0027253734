"""HTTP callbacks: a task of the tag `delaytasks.callback` is a POST, and the answer's status is its outcome."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from delaytasks.core.clock import UTC, Clock, monotonic
from delaytasks.core.errors import ForbiddenURLError, InvalidHeaderError
from delaytasks.core.forks import reset_in_child
from delaytasks.core.outcomes import Done, Fail, Outcome, Retry
from delaytasks.core.retry_schedule import NOTIFY
from delaytasks.core.settings import Settings
from delaytasks.core.task import DelayTask
from delaytasks.core.text import one_line, shown
from delaytasks.webhooks.addresses import Guard, Target
from delaytasks.webhooks.signatures import ID, SIGNATURE, TIMESTAMP, SigningKeys

if TYPE_CHECKING:
    import requests

    from delaytasks.webhooks.connections import Adapter

CALLBACK = "delaytasks.callback"
#: Of tasks that bring none of their own.
RETRY_SCHEDULE = NOTIFY
#: A receiver may ask for a longer wait than the ladder's, up to this.
RETRY_AFTER_MAX_S = 86400.0
#: An answer's body is read so far; what is longer costs its connection, no more.
ANSWER_MAX_BYTES = 64 * 1024
#: And so much of it is kept with a failed attempt.
QUOTED = 500

_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?")
_DEFAULT_HEADERS = {"Content-Type": "application/json", "User-Agent": "delaytasks"}
#: What frames the request, says where it goes, or what the receiver believes about its sender.
_OWN_HEADERS = {
    "accept-encoding", "connection", "content-encoding", "content-length", "expect", "host", "keep-alive", "te",
    "trailer", "transfer-encoding", "upgrade",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Callback:
    """What a row of the tag says, which may be another program's."""

    url: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_headers(self.headers)


class HttpCallbacks:
    """Thread-safe; each process has connections of its own."""

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
        """The body of a callback's task, checked."""
        self._guard.check(url)
        if not headers:
            return {"url": url, "body": body}
        _check_headers(headers)
        return {"url": url, "body": body, "headers": dict(headers)}

    def __call__(self, callback: Callback, task: DelayTask) -> Outcome:
        payload = json.dumps(callback.body, separators=(",", ":")).encode()
        try:
            return self._post(self._guard.check(callback.url), callback.headers, payload, task)
        except ForbiddenURLError as error:  # settings change, and so does what a name means
            return Retry(reason=f"forbidden: {error}")

    def close(self) -> None:
        if self._made is not None:
            self._made.close()

    def _post(
        self, target: Target, headers: Mapping[str, str], payload: bytes, task: DelayTask
    ) -> Outcome:
        import requests

        from delaytasks.webhooks import connections

        settings, adapter, where = self._settings, self._adapter(), target.place
        connections.ends.set(monotonic() + settings.callback_total_s)
        # For each step: look up the name, connect, by TLS too, send head and body.
        step_s = min(settings.callback_connect_s, settings.callback_total_s / 5)
        try:
            address = self._guard.address(target, task.attempts - 1, step_s)
            where = f"{target.place} ({address})"
            request = requests.PreparedRequest()
            headers = {**_DEFAULT_HEADERS, **headers, **self._own_headers(target, payload, task)}
            request.prepare("POST", target.at(address), headers, data=payload)
            response = adapter.send(
                request, stream=True, timeout=(step_s, settings.callback_read_s)
            )
            with closing(response):
                return self._outcome(response, task)
        except (requests.RequestException, OSError) as error:
            kind, cause = type(error).__name__, _cause(error)
            return Retry(
                reason=f"network: {kind} at {where}: {one_line(str(cause) or type(cause).__name__, QUOTED)}"
            )

    def _own_headers(self, target: Target, payload: bytes, task: DelayTask) -> dict[str, str]:
        """The id is the same each time, so that the receiver can tell what it has had already."""
        id, timestamp = str(task.id), str(int(self._clock.now().timestamp()))
        headers = {
            "Host": target.place,
            "Accept-Encoding": "identity",
            ID: id,
            TIMESTAMP: timestamp,
        }
        if self._keys:
            headers[SIGNATURE] = self._keys.sign(id, timestamp, payload)
        return headers

    def _adapter(self) -> Adapter:
        from delaytasks.webhooks.connections import Adapter

        with self._lock:
            if self._made is None:
                self._made = Adapter(
                    self._settings.callback_ca_file, self._settings.callback_in_flight
                )
            return self._made

    def _outcome(self, response: requests.Response, task: DelayTask) -> Outcome:
        """By the status alone: whatever befalls the rest of the answer, the receiver has said what it thinks."""
        status, quoted = response.status_code, _quoted(response)
        if 200 <= status < 300:
            return Done()
        said = f"HTTP {status}"
        if 300 <= status < 400:
            said += f", to {one_line(response.headers.get('Location', '?'))}: redirects are not followed"
        if quoted:
            said += f"\n{quoted}"
        if status == 410:
            return Fail(said)
        return Retry(self._asked_wait_s(response, task) if status in (429, 503) else None, said)

    def _asked_wait_s(self, response: requests.Response, task: DelayTask) -> float | None:
        """`Retry-After`, where that is longer than the ladder's own wait: a receiver that always asks for a second does
        not use up the ladder in ten."""
        asked = retry_after_s(response.headers.get("Retry-After", ""), self._clock.now())
        asked = min(asked, RETRY_AFTER_MAX_S, self._settings.max_delay_s)
        wait = (task.retry_schedule or RETRY_SCHEDULE).wait_s(task.attempts)
        return asked if wait is not None and asked > wait else None


def retry_after_s(text: str, now: datetime) -> float:
    """Seconds from now; the header has seconds or a date."""
    if re.fullmatch("[0-9]{1,15}", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
        return max(
            (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now.timestamp(), 0
        )
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _check_headers(headers: object) -> None:
    if not isinstance(headers, Mapping):
        raise InvalidHeaderError(f"headers are a mapping of strings, not {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidHeaderError(f"{shown(name)} can not be the name of a header")
        if name.lower() in _OWN_HEADERS or name.lower().startswith(("webhook-", "proxy-")):
            raise InvalidHeaderError(f"the header {name} is the sender's own")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            # It may be a secret.
            raise InvalidHeaderError(
                f"the header {name} has a value that is not a line of printable ASCII"
            )
    if len({name.lower() for name in headers}) < len(headers):
        raise InvalidHeaderError("a header is given twice")


def _quoted(response: requests.Response) -> str:
    """The first part of an answer, on one line. Read to its end, it leaves the connection for the next callback."""
    from urllib3.exceptions import HTTPError

    try:
        answer = response.raw.read(ANSWER_MAX_BYTES, decode_content=False)
    except (HTTPError, OSError):
        return ""
    return one_line(answer[: 4 * QUOTED].decode(errors="replace").strip(), QUOTED)


def _cause(error: BaseException) -> BaseException:
    """What a chain of errors began with: the libraries' own words quote the whole URL, which may hold secrets."""
    while (
        earlier := error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    ) is not None:
        error = earlier
    return error
