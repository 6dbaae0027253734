"""The body of a task: its JSON text, and its encrypted form."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import hmac
import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from delaytasks.model.errors import ConfigError, InvalidInputError
from delaytasks.model.inputs import check_integer
from delaytasks.model.text import shown

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]  # the name must exist

dump_any = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dump_json(value: Any) -> str:
    """Return the JSON of a value of JSON's own types. orjson treats other types differently."""
    if orjson is not None:
        try:
            return orjson.dumps(value).decode()
        except TypeError:
            pass  # an integer of more than 64 bits, a lone surrogate in an error text
    return dump_any(value)


#: Limits of `dump_flat`. Larger bodies are measured first: they may contain one text many times.
_MOST_VALUES, _MOST_CHARACTERS = 32, 128
_FLAT_TYPES = frozenset({int, bool, type(None)})


def dump_flat(value: Any) -> str | None:
    """Return the JSON of a small object with plain, storable values; None for all other bodies."""
    if orjson is None or type(value) is not dict or len(value) > _MOST_VALUES:
        return None
    for each in value.values():
        kind = type(each)
        if kind is str:
            if len(each) > _MOST_CHARACTERS:
                return None
        elif kind not in _FLAT_TYPES and (kind is not float or not math.isfinite(each)):
            return None
    try:
        text: bytes = orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS)
    except TypeError:
        return None
    return None if b"\\" in text else text.decode()  # an escaped character may not be storable


# -- Encode bodies and results as JSON that every database can store and every worker can read ----


MAX_DEPTH = 100
#: Python does not read integers of more than 4,300 digits.
_INTEGER_BITS = 14_280
_JSON_TYPES = frozenset({str, int, float, bool, type(None), dict, list, tuple})


def encode_body(body: Any, max_bytes: int) -> str:
    """Return the body as compact JSON, or raise an error with the path of the invalid value."""
    flat = dump_flat(body)
    if flat is not None and len(flat) * 4 <= max_bytes:
        return flat
    check = _Check(max_bytes)
    check.size(body, ("$",), 0)
    try:
        text = dump_json(body) if check.is_plain else dump_any(body)
    except (TypeError, ValueError, RecursionError) as error:
        # A subclass of a JSON type may show another content to the encoder than to the check.
        problem = f"{type(body).__name__} cannot be expressed in JSON ({type(error).__name__})"
        raise _invalid(("$",), f": {problem}") from None
    # A character has at most 4 bytes, so only texts near the limit must be encoded to be measured.
    if len(text) * 4 > max_bytes and (size := len(text.encode())) > max_bytes:
        raise _too_large(max_bytes, f": {size:,}")
    return text


def _too_large(max_bytes: int, size: str = "") -> InvalidInputError:
    error = InvalidInputError(
        f"the body is more than {max_bytes:,} bytes of JSON (setting max_body_bytes){size}; "
        "store it elsewhere and schedule its name",
        "body",
    )
    error.is_too_large = True
    return error


#: The path of a value in the body: the path of its container, and its key or index.
_Path = tuple[Any, ...]


class _Check:
    """Checks one body. If it contains a value many times, it fails before all of it is visited."""

    __slots__ = ("is_plain", "room")

    def __init__(self, room: int) -> None:
        self.room = room
        #: Whether all values are of JSON's own types, without subclasses.
        self.is_plain = True

    def size(self, value: Any, path: _Path, depth: int) -> int:
        """Return a lower bound of the length of the JSON."""
        if type(value) not in _JSON_TYPES:
            self.is_plain = False
        if isinstance(value, str):
            return _check_storable(value, path)
        if isinstance(value, int):
            if value.bit_length() > _INTEGER_BITS:
                raise _invalid(path, ": an integer of more than 4,300 digits cannot be read back")
        elif isinstance(value, (dict, list, tuple)):
            return self._of_items(value, path, depth)
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise _invalid(path, f": {value!r} cannot be expressed in JSON")
        elif value is not None:
            remedy = "convert it first (str(value), list(value), value.id, …)"
            raise _invalid(path, f": {type(value).__name__} cannot be expressed in JSON; {remedy}")
        return 1

    def _of_items(self, value: dict[Any, Any] | Sequence[Any], path: _Path, depth: int) -> int:
        if depth >= MAX_DEPTH:
            problem = f"… is nested deeper than {MAX_DEPTH}, or contains itself"
            raise _invalid(path, problem, longest=80)
        size, is_object = 1, isinstance(value, dict)
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if is_object:
                if not isinstance(key, str):
                    problem = f"the key {shown(key)} is not a string, but {type(key).__name__}"
                    raise _invalid(path, f": {problem}")
                size += self.size(key, path, depth) + 1
            size += self.size(item, (path, key), depth + 1) + 1
            if size > self.room:
                raise _too_large(self.room)
        return size


def _check_storable(text: str, path: _Path) -> int:
    if not text.isascii() or "\x00" in text:
        if "\x00" in text:
            raise _invalid(path, " contains NUL (\\u0000), which cannot be stored")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _invalid(path, " contains a lone surrogate, which cannot be stored") from None
    return len(text) + 2


def _invalid(path: _Path, problem: str, longest: int = 200) -> InvalidInputError:
    """Return an error that begins with the path of a value, such as $.items[3].name."""
    names: list[str] = []
    while len(path) == 2:
        path, name = path
        names.append(f"[{name}]" if isinstance(name, int) else f".{name}")
    return InvalidInputError("".join(["$", *reversed(names)])[:longest] + problem, "body")


def plain(body: Any) -> Any:
    """Convert a dataclass or a pydantic model to JSON types; return any other body unchanged."""
    if type(body) is dict:  # as most bodies are
        return body
    if dataclasses.is_dataclass(body) and not isinstance(body, type):
        return dataclasses.asdict(body)
    if hasattr(body, "model_dump"):
        return body.model_dump(mode="json")
    return body


#: The version of bodies that were stored without one.
FIRST_VERSION = 1
MAX_VERSION = 1_000_000


def check_version(version: object) -> int:
    rule = "the version of a body is an integer from 1"
    return check_integer(version, "body_version", FIRST_VERSION, MAX_VERSION, rule)


# -- Encrypted bodies and results: their form, the names of keys, and the cipher ------------------

# With keys, `message_body` and `result` contain `aesgcm:<name of the key>:<token>`. A token is
# bound to its column and to the id and tag of its task, which never change: in any other row or
# column it cannot be read.


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


def checked_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return a valid value of the setting: different keys, optionally after `PLAIN`."""
    real = keys[1:] if keys[:1] == (PLAIN,) else keys
    is_right = all(map(_KEY.fullmatch, real)) and len(set(map(key_name, real))) == len(real)
    if not is_right or (keys and not real):
        raise ValueError("malformed or repeated keys")
    return keys


def name_in(text: str) -> str:
    """Return the name of the key of an encrypted text; `NO_NAME` if the text is malformed."""
    return text[len(PREFIX) : MARK_LENGTH] if _MARK.match(text) else NO_NAME
