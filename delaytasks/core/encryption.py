"""The form of encrypted bodies and the names of keys. `Cipher` encrypts and decrypts."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from delaytasks.core.errors import BodyEncryptedError
from delaytasks.core.json_text import load_json

#: As the first key: new bodies are stored unencrypted, and the other keys only read.
PLAIN = "plain"
#: The beginning of an encrypted text. The name of the key, a colon and a token follow. The token is
#: bound to its place in the table. No JSON text begins like this.
BOUND_PREFIX = "aesgcm:"
#: The beginning of the earlier form, whose Fernet token can be read in the row of any task.
UNBOUND_PREFIX = "fernet:"
PREFIXES = (BOUND_PREFIX, UNBOUND_PREFIX)
NAME_LENGTH = 8
#: The length of the text before the second colon.
MARK_LENGTH = len(BOUND_PREFIX) + NAME_LENGTH
#: The name of a key that the text does not show.
NO_NAME = "?"
_MARK = re.compile(rf"(?:{'|'.join(PREFIXES)})[0-9a-f]{{{NAME_LENGTH}}}:")
_KEY = re.compile(r"[A-Za-z0-9_-]{43}=")


class TextCipher(Protocol):
    """What the storage needs of `Cipher`, which an unencrypted deployment does not import."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def current(self) -> str: ...

    def seal(self, text: str, column: str, id: int, tag: str) -> str: ...
    def read(self, text: str, column: str, id: int, tag: str) -> str: ...


def new_key() -> str:
    return base64.urlsafe_b64encode(os.urandom(32)).decode()


def key_name(key: str) -> str:
    """Return the name of a key, which identifies the key and does not reveal it."""
    return hashlib.sha256(b"delaytasks key\0" + base64.urlsafe_b64decode(key)).hexdigest()[
        :NAME_LENGTH
    ]


def names_of(keys: Iterable[str]) -> list[str]:
    """Return the names of keys, the first of which may be `PLAIN`."""
    return [key if key == PLAIN else key_name(key) for key in keys]


def are_keys(keys: Sequence[str]) -> bool:
    """Return whether a value of the setting is valid: different keys, optionally after `PLAIN`."""
    real = keys[1:] if keys[:1] == (PLAIN,) else keys
    if not all(map(_KEY.fullmatch, real)) or (keys and not real):
        return False
    return len(set(map(key_name, real))) == len(real)


def is_encrypted(text: object) -> bool:
    return isinstance(text, str) and text.startswith(PREFIXES)


def mark_of(name: str) -> str:
    """Return the beginning of texts that are encrypted with the key of this name."""
    return BOUND_PREFIX + name


def marks_of(names: Iterable[str]) -> list[str]:
    """Return the beginnings of all texts that these keys read, with the colon."""
    return [f"{prefix}{name}:" for name in names for prefix in PREFIXES]


def is_bound(text: str) -> bool:
    """Return whether an encrypted text is bound to its place in the table."""
    return text.startswith(BOUND_PREFIX)


def name_in(text: str) -> str:
    """Return the name of the key of an encrypted text; `NO_NAME` if the text is malformed."""
    return text[len(BOUND_PREFIX) : MARK_LENGTH] if _MARK.match(text) else NO_NAME


def decoded(text: str, what: str) -> Any:
    """Return the value of a JSON text, or raise `BodyEncryptedError` if no key could decrypt it."""
    if is_encrypted(text):
        raise BodyEncryptedError(
            f"{what} is encrypted with key {name_in(text)}, which delaytasks_encryption_keys "
            "does not have here, or was changed since, or belongs to another task"
        )
    return load_json(text)


def placeholder(text: str) -> str:
    """Return the text that is shown instead of an unreadable one."""
    return f"(encrypted with key {name_in(text)}, which can not read it here)"
