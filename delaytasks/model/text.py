"""Texts of messages: shortened values, masked secrets, remedies."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import cache
from importlib import metadata
from itertools import islice
from shlex import quote
from typing import Any

from delaytasks.model.errors import ConfigError

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_CUT = "\n… {n:,} characters left out …\n"


def storable(text: str, max_bytes: int) -> str:
    """Replace characters that databases refuse, and leave out the middle of a long text."""
    text = _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    if len(text.encode()) <= max_bytes:
        return text
    # A character has at most four bytes. The end of a traceback is more useful than its start.
    keep = max(max_bytes - 64, 0) // 4
    head = keep // 4
    return text[:head] + _CUT.format(n=len(text) - keep) + text[len(text) - (keep - head) :]


#: Why a worker defers a task, by the code that its event has: the beginning of the row's error.
DEFERRALS = {
    "no_processor": "no such processor, tag=",
    "no_key": "no such encryption key, key=",
    "no_time_limits": "this worker's pool can not keep time limits, tag=",
    "newer_body": "the body is of a newer version than this worker's processor, tag=",
}

#: A task that cannot run here is tried again after a tenth of its lateness, within these bounds.
DEFER_MIN_S, DEFER_MAX_S = 5.0, 600.0


def defer_until(why: str, due: datetime) -> str:
    return f"{why}; next try at {due.isoformat()}"


def traceback_text(error: BaseException, max_bytes: int) -> str:
    """Return the traceback from the processor's frame on, even if `str(error)` fails."""
    frames = error.__traceback__
    while frames and str(frames.tb_frame.f_globals.get("__name__")).startswith("delaytasks."):
        frames = frames.tb_next
    frames = frames or error.__traceback__
    try:
        text = "".join(traceback.format_exception(type(error), error, frames))
    except Exception as failure:
        text = f"{type(error).__name__} (its text can not be made: {type(failure).__name__})"
    return storable(text, max_bytes)


def shown(value: object, longest: int = 60) -> str:
    """Return a short `repr` for messages, also of objects whose `repr` fails."""
    try:
        text = f"{value.total_seconds():g} s" if isinstance(value, timedelta) else repr(value)
    except Exception:
        return f"<{type(value).__name__}>"
    return text if len(text) <= longest else text[:longest] + "…"


def one_line(text: str, longest: int = 200) -> str:
    """Return a text as one line for logs and tables, with control characters escaped."""
    escaped = (
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:longest]
    )
    return "".join(escaped) + "…" * (len(text) > longest)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun, such as "1 task" or "1,200 tasks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def some_values(values: Collection[object], most: int = 3) -> str:
    """Return the first values for a list that a person reads, and how many more there are."""
    text = ", ".join(map(str, islice(values, most)))
    return f"{text} and {len(values) - most:,} more" if len(values) > most else text


#: Names in one sentence or command.
MOST_NAMES = 5


def one_more_worker(queues: Collection[str], namespace: str) -> str:
    """Return the remedy for queues that no worker serves, while other workers run.

    With -Q a worker serves no other queues, not even those of the app's own tasks.
    """
    names = quote(",".join(f"{namespace}.{queue}" for queue in islice(queues, MOST_NAMES)))
    return f"Start one more worker: celery -A … worker -Q {names}"


# -- Mask passwords and keys in URLs and in the `repr` of objects ---------------------------------


#: Options of a URL whose values are masked.
_OPTION = re.compile(
    r"(?i)([\w.-]*(?:pass|pwd|secret|token|key|credential|signature)[\w.-]*=)[^&]*"
)
#: User and password after any scheme, up to the last @, which a password may contain.
_PASSWORD = re.compile(r"(?s)(?<=://)([^/@:\s]*):.*@")
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")


class Secret(str):
    """A text whose `repr` is masked, and so in `vars`, tracebacks and most error reporters.

    `str` is not masked, and the text is used like any other.
    """

    def __repr__(self) -> str:
        return repr(mask_secret(self))


class SecretBytes(bytes):
    """The bytes of a key, with a masked `repr`."""

    def __repr__(self) -> str:
        return "b'***'"


def mask_url(url: str) -> str:
    """Mask the password of a URL or a part of one, before the host or among the options.

    Keys for signing are masked as well.
    """
    url = ";".join(map(_without_user, _PASSWORD.sub(r"\1:***@", url).split(";")))
    url = re.sub(r"whsec_\S+", "whsec_***", url)
    return _OPTION.sub(r"\1***", url)


def _without_user(url: str) -> str:
    """Mask the user of a URL without a scheme, because it may be a password."""
    before, at, after = url.rpartition("@")
    if not at or _SCHEME.match(url):
        return url
    user, colon, _ = before.partition(":")
    return f"{user}:***@{after}" if colon else f"***@{after}"


def mask_secret(value: str) -> str:
    """Return a secret setting as it is shown: a URL without its password, or only asterisks."""
    if "://" in value or not value:
        return mask_url(value)
    return "whsec_***" if value.startswith("whsec_") else "***"


def hide(value: Any) -> Any:
    """Return the same text, bytes or list of texts with a masked `repr`; other types unchanged."""
    if isinstance(value, str):
        return Secret(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(hide, value)) if type(value) in (list, tuple) else value
    return SecretBytes(value) if isinstance(value, bytes) else value


# -- The versions of installed packages, and errors for those that are missing --------------------


@cache
def installed_version(package: str = "delaytasks") -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def needs_extra(extra: str, what: str = "this command") -> Iterator[None]:
    """Report a module that cannot be imported as a `ConfigError` that names the extra."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} needs more packages ({error.name}): pip install 'delaytasks[{extra}]'"
        ) from error


# -- What a user does if the tables are missing or old, for messages ------------------------------


#: The command for a Celery app of the user's own. A `DelayTasks` of an integration with a web
#: framework names the command of the framework instead.
TABLES_REMEDY = "run: delaytasks -A APP db upgrade"
