"""Mask passwords and keys in URLs and in the `repr` of objects."""

from __future__ import annotations

import re
from typing import Any

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
