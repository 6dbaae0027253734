"""Encrypts texts before they are stored, and decrypts them when rows are read, if encryption keys
are set."""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from collections.abc import Sequence

from delaytasks.core.encryption import (
    BOUND_PREFIX,
    MARK_LENGTH,
    PLAIN,
    UNBOUND_PREFIX,
    key_name,
    mark_of,
    names_of,
)
from delaytasks.core.errors import ConfigError

_NONCE_BYTES = 12
#: Separates this use of a key from its use as a Fernet key in earlier versions.
_USE = b"delaytasks aesgcm"


class Cipher:
    """Encrypts with the first key and decrypts with all keys. A token names its key, so only that
    key is tried.

    A token is bound to its column and to the id and tag of its task, which never change: in any
    other row or column it cannot be read. Tokens of the earlier form, Fernet, are not bound. They
    are read, but no longer written.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.fernet import Fernet, InvalidToken
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError:
            raise ConfigError(
                "delaytasks_encryption_keys needs cryptography: "
                "pip install 'delaytasks[encryption]'"
            ) from None
        # binascii.Error and UnicodeDecodeError are ValueErrors.
        self._unreadable = (InvalidTag, InvalidToken, ValueError)
        real = {key_name(key): key for key in keys if key != PLAIN}
        self._ciphers = {name: AESGCM(_derived(key)) for name, key in real.items()}
        self._fernets = {name: Fernet(key) for name, key in real.items()}
        #: The names of all keys.
        self.names = tuple(real)
        #: The name of the key for new texts; empty if they are stored as plain text.
        self.current = names_of(keys[:1])[0] if keys[0] != PLAIN else ""
        self._first = self._ciphers.get(self.current)
        self._begin = mark_of(self.current) + ":"

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
        if not isinstance(text, str) or not text.startswith((BOUND_PREFIX, UNBOUND_PREFIX)):
            return text
        name, token = text[len(BOUND_PREFIX) : MARK_LENGTH], text[MARK_LENGTH + 1 :]
        if name not in self._ciphers:
            return text
        try:
            if text.startswith(UNBOUND_PREFIX):
                return self._fernets[name].decrypt(token.encode()).decode()
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
