"""Passwords and keys where people look: masked in URLs, and in what Python shows of an object."""

from __future__ import annotations

import re
from typing import Any

#: Options of a URL whose values are hidden.
_OPTION = re.compile(
    r"(?i)([\w.-]*(?:pass|pwd|secret|token|key|credential|signature)[\w.-]*=)[^&]*"
)
#: User and password after any scheme; up to the last @, since a password may have some.
_PASSWORD = re.compile(r"(?s)(?<=://)([^/@:\s]*):.*@")
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://")


class Secret(str):
    """A text that is used like any other. `repr`, and so `vars`, tracebacks with local variables and most error
    reporters, show it masked; `str` does not."""

    def __repr__(self) -> str:
        return repr(mask_secret(self))


class SecretBytes(bytes):
    """As `Secret`, for the bytes of a key."""

    def __repr__(self) -> str:
        return "b'***'"


def mask_url(url: str) -> str:
    """A URL, or a part of one, without its password, wherever it stands: before the host or among the options; or a key
    for signing."""
    url = ";".join(map(_without_user, _PASSWORD.sub(r"\1:***@", url).split(";")))
    url = re.sub(r"whsec_\S+", "whsec_***", url)
    return _OPTION.sub(r"\1***", url)


def _without_user(url: str) -> str:
    """One of several URLs. Without a scheme nobody can tell the name of a user from a password."""
    before, at, after = url.rpartition("@")
    if not at or _SCHEME.match(url):
        return url
    user, colon, _ = before.partition(":")
    return f"{user}:***@{after}" if colon else f"***@{after}"


def mask_secret(value: str) -> str:
    """What is shown of a secret setting: a URL without its password, and nothing of what is no URL."""
    if "://" in value or not value:
        return mask_url(value)
    return "whsec_***" if value.startswith("whsec_") else "***"


def hide(value: Any) -> Any:
    """The same value, or the same list of values, that shows nothing. What is no text is refused later."""
    if isinstance(value, str):
        return Secret(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(hide, value)) if type(value) in (list, tuple) else value
    return SecretBytes(value) if isinstance(value, bytes) else value
