"""HTTP callbacks: a task of the tag `delaytasks.callback` is a POST, and the response's status is
its outcome.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from contextlib import closing
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from delaytasks.core.celery_calls import RETRY_SCHEDULE, Callback
from delaytasks.core.clock import UTC, Clock, monotonic, reset_in_child
from delaytasks.core.errors import ForbiddenURLError
from delaytasks.core.settings import Settings
from delaytasks.core.task import DelayTask, Done, Fail, Outcome, Retry
from delaytasks.core.text import one_line
from delaytasks.webhooks.addresses import Guard, Target
from delaytasks.webhooks.signatures import ID, SIGNATURE, TIMESTAMP, SigningKeys

if TYPE_CHECKING:
    import requests

    from delaytasks.webhooks.connections import Adapter

#: A receiver may ask for a longer wait than the next retry delay, up to this.
MAX_RETRY_AFTER_S = 86400.0
#: The part of a response's body that is read. The connection of a longer response is closed.
MAX_RESPONSE_BYTES = 64 * 1024
#: The part of a response that is stored with a failed attempt.
MAX_QUOTED_CHARS = 500
_DEFAULT_HEADERS = {"Content-Type": "application/json", "User-Agent": "delaytasks"}


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
        Callback(url, body, headers or {})
        content = {"url": url, "body": body}
        return {**content, "headers": dict(headers)} if headers else content

    def __call__(self, callback: Callback, task: DelayTask) -> Outcome:
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
        self, target: Target, headers: Mapping[str, str], payload: bytes, task: DelayTask
    ) -> Outcome:
        import requests

        from delaytasks.webhooks import connections

        settings, adapter, where = self._settings, self._adapter(), target.host_and_port
        connections.deadline.set(monotonic() + settings.callback_total_s)
        # The time limit of each step: look up the name, connect, negotiate TLS, send head and body.
        step_s = min(settings.callback_connect_s, settings.callback_total_s / 5)
        try:
            address = self._guard.address(target, task.attempts - 1, step_s)
            where = f"{target.host_and_port} ({address})"
            request = requests.PreparedRequest()
            headers = {**_DEFAULT_HEADERS, **headers, **self._own_headers(target, payload, task)}
            request.prepare("POST", target.url_at(address), headers, data=payload)
            response = adapter.send(
                request, stream=True, timeout=(step_s, settings.callback_read_s)
            )
            with closing(response):
                return self._outcome(response, task)
        except (requests.RequestException, OSError) as error:
            cause = _first_cause(error)
            text = one_line(str(cause) or type(cause).__name__, MAX_QUOTED_CHARS)
            return Retry(reason=f"network: {type(error).__name__} at {where}: {text}")

    def _own_headers(self, target: Target, payload: bytes, task: DelayTask) -> dict[str, str]:
        """Return the headers that identify, time and sign the callback.

        The id is the same in each attempt, so that the receiver can recognize a repetition.
        """
        id, timestamp = str(task.id), str(int(self._clock.now().timestamp()))
        headers = {
            "Host": target.host_and_port,
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

    def _asked_wait_s(self, response: requests.Response, task: DelayTask) -> float | None:
        """Return the wait of `Retry-After` if it is longer than the next retry delay, else None.

        Otherwise a receiver that always asks for one second would use up the retry schedule in some
        seconds.
        """
        asked = retry_after_s(response.headers.get("Retry-After", ""), self._clock.now())
        asked = min(asked, MAX_RETRY_AFTER_S, self._settings.max_delay_s)
        wait = (task.retry_schedule or RETRY_SCHEDULE).wait_s(task.attempts)
        return asked if wait is not None and asked > wait else None


def retry_after_s(text: str, now: datetime) -> float:
    """Return the seconds from `now` in a `Retry-After` header, which has seconds or a date."""
    if re.fullmatch("[0-9]{1,15}", text):
        return float(text)
    try:
        when = parsedate_to_datetime(text)
        return max(
            (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() - now.timestamp(), 0
        )
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _quoted(response: requests.Response) -> str:
    """Return the first part of a response on one line.

    A response that is read to its end leaves its connection to the next callback.
    """
    from urllib3.exceptions import HTTPError

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
