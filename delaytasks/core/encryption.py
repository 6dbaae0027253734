"""Encrypted bodies and results: their form, the names of keys, and the cipher.

With keys, `message_body` and `result` contain `aesgcm:<name of the key>:<token>`. A token is bound
to its column and to the id and tag of its task, which never change: in any other row or column it
cannot be read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from delaytasks.core.errors import BodyEncryptedError, ConfigError
from delaytasks.core.json_text import load_json

#: As the first key: new bodies are stored unencrypted, and the other keys only read.
PLAIN = "plain"
#: The beginning of an encrypted text. The name of the key, a colon and a token follow. No JSON text
#: begins like this.
PREFIX = "aesgcm:"
NAME_LENGTH = 8
#: The length of the text before the second colon.
MARK_LENGTH = len(PREFIX) + NAME_LENGTH
#: The name of a key that the text does not show.
NO_NAME = "?"
_MARK = re.compile(rf"{PREFIX}[0-9a-f]{{{NAME_LENGTH}}}:")
_KEY = re.compile(r"[A-Za-z0-9_-]{43}=")
_NONCE_BYTES = 12
#: Separates this use of a key from other uses.
_USE = b"delaytasks aesgcm"


class Cipher:
    """Encrypts with the first key and decrypts with all keys. A token names its key, so only that
    key is tried."""

    def __init__(self, keys: Sequence[str]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError(
                "delaytasks_encryption_keys needs cryptography: "
                "pip install 'delaytasks[encryption]'"
            ) from None
        # binascii.Error and UnicodeDecodeError are ValueErrors.
        self._unreadable = (InvalidTag, ValueError)
        real = {key_name(key): key for key in keys if key != PLAIN}
        self._ciphers = {name: AESGCM(_derived(key)) for name, key in real.items()}
        #: The names of all keys.
        self.names = tuple(real)
        #: Encrypts new texts; None if they are stored as plain text.
        self._first = None if keys[0] == PLAIN else self._ciphers[self.names[0]]
        self._begin = f"{PREFIX}{self.names[0]}:"

    def seal(self, text: str, column: str, id: int, tag: str) -> str:
        if self._first is None:
            return text
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._first.encrypt(nonce, text.encode(), _place(column, id, tag))
        return self._begin + binascii.b2a_base64(nonce + sealed, newline=False).decode()

    def read(self, text: str, column: str, id: int, tag: str) -> str:
        """Decrypt a text.

        Plain text is returned as it is, and so is text that no key here can decrypt in this place.
        No JSON looks like that.
        """
        if not isinstance(text, str) or not text.startswith(PREFIX):
            return text
        name, token = text[len(PREFIX) : MARK_LENGTH], text[MARK_LENGTH + 1 :]
        if name not in self._ciphers:
            return text
        try:
            sealed = binascii.a2b_base64(token)
            opened = self._ciphers[name].decrypt(
                sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], _place(column, id, tag)
            )
            return opened.decode()
        except self._unreadable:
            return text


def _derived(key: str) -> bytes:
    return hmac.digest(base64.urlsafe_b64decode(key), _USE, "sha256")


def _place(column: str, id: int, tag: str) -> bytes:
    """Return the associated data of a token. Columns and ids contain no NUL, so different places
    differ."""
    return f"{column}\0{id}\0{tag}".encode(errors="surrogatepass")


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
    return isinstance(text, str) and text.startswith(PREFIX)


def marks_of(names: Iterable[str]) -> list[str]:
    """Return the beginnings of all texts that these keys read, with the colon."""
    return [f"{PREFIX}{name}:" for name in names]


def name_in(text: str) -> str:
    """Return the name of the key of an encrypted text; `NO_NAME` if the text is malformed."""
    return text[len(PREFIX) : MARK_LENGTH] if _MARK.match(text) else NO_NAME


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
