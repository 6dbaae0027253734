"""How a body looks that is stored encrypted, and the names of keys. The keys themselves do their work in the store."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from delaytasks.core.errors import BodyEncryptedError

#: In the place of the first key: what is new is stored as it is, and the others read what they have encrypted.
PLAIN = "plain"
#: Then comes the name of the key, a colon, and a token that is bound to its place in the table. No JSON begins so.
PREFIX = "aesgcm:"
#: The earlier form, as long as `PREFIX`: its token is Fernet's, and can be read in the row of any task.
UNBOUND_PREFIX = "fernet:"
PREFIXES = (PREFIX, UNBOUND_PREFIX)
NAME_LENGTH = 8
#: Up to the second colon, and without it.
MARK_LENGTH = len(PREFIX) + NAME_LENGTH
#: Instead of a name where none can be told.
NO_NAME = "?"
_MARK = re.compile(rf"(?:{'|'.join(PREFIXES)})[0-9a-f]{{{NAME_LENGTH}}}:")
_KEY = re.compile(r"[A-Za-z0-9_-]{43}=")


def new_key() -> str:
    return base64.urlsafe_b64encode(os.urandom(32)).decode()


def key_name(key: str) -> str:
    """By which a key can be told from others, and not found out."""
    return hashlib.sha256(b"delaytasks key\0" + base64.urlsafe_b64decode(key)).hexdigest()[
        :NAME_LENGTH
    ]


def names_of(keys: Iterable[str]) -> list[str]:
    """Of keys that may begin with `PLAIN`."""
    return [key if key == PLAIN else key_name(key) for key in keys]


def are_keys(keys: Sequence[str]) -> bool:
    """Whether they are what the setting takes: Fernet keys, or `PLAIN` and then some."""
    real = keys[1:] if keys[:1] == (PLAIN,) else keys
    if not all(map(_KEY.fullmatch, real)) or (keys and not real):
        return False
    return len(set(map(key_name, real))) == len(real)


def is_encrypted(text: object) -> bool:
    return isinstance(text, str) and text.startswith(PREFIXES)


def mark_of(name: str) -> str:
    """How a text begins that is encrypted with this key now."""
    return PREFIX + name


def marks_of(names: Iterable[str]) -> list[str]:
    """How all texts begin that one of these keys reads, with the colon."""
    return [f"{prefix}{name}:" for name in names for prefix in PREFIXES]


def is_bound(text: str) -> bool:
    """Whether an encrypted text is bound to its place in the table."""
    return text.startswith(PREFIX)


def name_in(text: str) -> str:
    """That of the key which an encrypted text needs; `NO_NAME` if it does not begin as we write it."""
    return text[len(PREFIX) : MARK_LENGTH] if _MARK.match(text) else NO_NAME


def decoded(text: str, what: str) -> Any:
    """The value of a text that was read with the keys that are here."""
    if is_encrypted(text):
        raise BodyEncryptedError(
            f"{what} is encrypted with key {name_in(text)}, which delaytasks_encryption_keys does not have here, or "
            "was changed since, or belongs to another task"
        )
    return json.loads(text)


def placeholder(text: str) -> str:
    """What is shown of a text that can not be read."""
    return f"(encrypted with key {name_in(text)}, which can not read it here)"
