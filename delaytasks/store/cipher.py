"""Texts on their way into the table and out of it, where they are kept encrypted."""

from __future__ import annotations

from collections.abc import Sequence

from delaytasks.core.encryption import MARK_LENGTH, PLAIN, PREFIX, key_name, mark_of, names_of
from delaytasks.core.errors import ConfigError


class Cipher:
    """The first key encrypts, all of them read. A token says which one it needs, so none is tried in vain."""

    def __init__(self, keys: Sequence[str]) -> None:
        try:
            from cryptography.fernet import Fernet, InvalidToken
        except ImportError:
            raise ConfigError(
                "delaytasks_encryption_keys needs cryptography: pip install 'delaytasks[encryption]'"
            ) from None
        self._unreadable = (InvalidToken, ValueError)
        self._fernets = {key_name(key): Fernet(key) for key in keys if key != PLAIN}
        #: Those of all keys.
        self.names = tuple(self._fernets)
        #: That of the key for what is new; empty: it stays as it is.
        self.current = names_of(keys[:1])[0] if keys[0] != PLAIN else ""
        self._first = self._fernets.get(self.current)
        self._begin = mark_of(self.current) + ":"

    def seal(self, text: str) -> str:
        return text if self._first is None else self._begin + self._first.encrypt(text.encode()).decode()

    def read(self, text: str) -> str:
        """What is plain, or can not be read, as it is: no JSON looks like that."""
        if not isinstance(text, str) or not text.startswith(PREFIX):
            return text
        fernet = self._fernets.get(text[len(PREFIX) : MARK_LENGTH])
        if fernet is None:
            return text
        try:
            return fernet.decrypt(text[MARK_LENGTH + 1 :].encode()).decode()
        except self._unreadable:
            return text


def cipher_of(keys: Sequence[str]) -> Cipher | None:
    """None without keys: then nobody needs cryptography."""
    return Cipher(keys) if keys else None
