"""The keys of the HTTP API and their scopes. Only hashes of keys are stored."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from delaytasks.model.errors import ConfigError
from delaytasks.model.inputs import CELERY_PREFIX, check_actor
from delaytasks.operate.access import WatchedFile

#: The file in the data folder.
API_KEYS = "api-keys.json"
#: Every key begins with this, so that programs that search for leaked secrets find it.
KEY_PREFIX = "dtk"
READ_SCOPE, OPERATE_SCOPE, SCHEDULE_SCOPE = "read", "operate", "schedule"
#: Tasks with these tags send HTTP requests and messages.
OWN_PREFIX = "delaytasks."


@dataclass(frozen=True, slots=True)
class Scopes:
    """The rights of an API key.

    Attributes
    ----------
    can_read
        Whether it may read all tasks and statistics.
    can_operate
        Whether it may change all tasks.
    patterns
        Patterns of the tags whose tasks it may schedule, read and change.
    """

    can_read: bool
    can_operate: bool
    patterns: tuple[str, ...]

    @classmethod
    def of(cls, texts: Sequence[str]) -> Scopes:
        """Read scopes such as `read` and `schedule:order.*`."""
        patterns = []
        for text in texts:
            start, _, pattern = text.partition(":")
            if start == SCHEDULE_SCOPE and pattern:
                patterns.append(pattern)
            elif text not in (READ_SCOPE, OPERATE_SCOPE):
                raise ConfigError(
                    f"{text!r:.60} is no scope of an API key: read, operate, or schedule:PATTERN "
                    "as in schedule:order.*"
                )
        if not texts:
            raise ConfigError("an API key needs a scope: read, operate or schedule:PATTERN")
        return cls(READ_SCOPE in texts, OPERATE_SCOPE in texts, tuple(patterns))

    def covers(self, tag: str) -> bool:
        """Return whether the key may schedule, read and change tasks of a tag.

        The pattern `*` does not cover the tags of callbacks, since they send requests to any host:
        a pattern has to name them. No pattern covers the rows of Celery tasks.
        """
        if tag.startswith(CELERY_PREFIX):
            return False
        is_own = tag.startswith(OWN_PREFIX)
        return any(
            fnmatchcase(tag, pattern)
            for pattern in self.patterns
            if not is_own or pattern.startswith(OWN_PREFIX)
        )


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The key of one caller. The name is the actor of its changes."""

    name: str
    scopes: Scopes


class FindsKeys(Protocol):
    """The keys that an HTTP API accepts: `ApiKeys`, or an `ApiKeyFile`."""

    def find(self, presented: str) -> ApiKey | None:
        """Return the key that a caller presents, or None if it is unknown."""


class ApiKeys:
    """Keys by the entries that `new_entry` makes.

    Parameters
    ----------
    entries
        The entry of each key by name, for example from the configuration of an application.

    Raises
    ------
    ConfigError
        If an entry is wrong.

    Examples
    --------
    >>> keys = ApiKeys(app.config["DELAYTASKS_API_KEYS"])
    """

    def __init__(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        self.entries = entries
        self._by_hash: dict[str, ApiKey] = {}
        for name, entry in entries.items():
            try:
                key = ApiKey(check_actor(name), Scopes.of(entry["scopes"]))
                self._by_hash[str(entry["hash"])] = key
            except (KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"the API key {name!r:.60} is incomplete: {error!r}") from error

    def find(self, presented: str) -> ApiKey | None:
        return self._by_hash.get(_hash(presented))


class ApiKeyFile:
    """Keys in a file, which is read again when it changes.

    Parameters
    ----------
    path
        The file. It is made with the first key.

    Examples
    --------
    >>> keys = ApiKeyFile(Path("/etc/delaytasks/api-keys.json"))
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = WatchedFile(path, {"keys": {}}, _read_keys, "API keys")

    def find(self, presented: str) -> ApiKey | None:
        return self._file.read().find(presented)

    @property
    def entries(self) -> Mapping[str, Mapping[str, Any]]:
        """The entry of each key by name. No entry reveals its key."""
        return self._file.read().entries

    def create(self, name: str, scopes: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """Store a new key. Return the key, which is stored nowhere, and its entry."""
        if name in self.entries:
            raise ConfigError(f"{self.path} has an API key {name!r:.60} already: choose a name")
        key, entry = new_entry(scopes)
        ApiKeys({name: entry})  # raises the errors of a wrong name
        self._file.write({"keys": {**self.entries, name: entry}})
        return key, entry

    def remove(self, name: str) -> bool:
        """Remove a key; return False if there is none of this name."""
        entries = dict(self.entries)
        if entries.pop(name, None) is None:
            return False
        self._file.write({"keys": entries})
        return True


def new_entry(scopes: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return a new key, and the entry that recognizes it.

    Parameters
    ----------
    scopes
        `read`, `operate` and `schedule:PATTERN`.
    """
    Scopes.of(scopes)  # raises the error of a wrong scope
    key = f"{KEY_PREFIX}_{secrets.token_urlsafe(32)}"
    return key, {"hash": _hash(key), "scopes": list(scopes)}


def _read_keys(document: Any) -> ApiKeys:
    return ApiKeys(document["keys"])


def _hash(key: str) -> str:
    # A key of 256 random bits cannot be guessed, so a salt or a slow hash would add nothing.
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
