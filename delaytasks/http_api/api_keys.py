"""The keys of the HTTP API and their scopes. Only hashes of keys are stored."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from delaytasks.model.errors import ConfigError
from delaytasks.model.inputs import CELERY_PREFIX, check_actor
from delaytasks.operate.serving import EntryFile

#: The file in the data folder.
API_KEYS = "api-keys.json"
#: Every key begins with this, so that programs that search for leaked secrets find it.
KEY_PREFIX = "dtk"
#: The scopes for all tasks, and those that are followed by a pattern.
READ, OPERATE, SCHEDULE, QUEUE = "read", "operate", "schedule", "queue"
#: Tasks with these tags send HTTP requests and messages.
OWN_PREFIX = "delaytasks."


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The key of one caller.

    Attributes
    ----------
    name
        The actor of its changes.
    rights
        `read` if it may read all tasks, and `operate` if it may change all tasks.
    tags
        Patterns of the tags whose tasks it may schedule, read and change.
    queues
        Patterns of the queues that its requests may name, besides those of the settings.
    """

    name: str
    rights: frozenset[str]
    tags: tuple[str, ...]
    queues: tuple[str, ...]

    @classmethod
    def of(cls, name: str, scopes: Sequence[str]) -> ApiKey:
        """Read scopes such as `read`, `schedule:order.*` and `queue:mail`."""
        patterns: dict[str, list[str]] = {SCHEDULE: [], QUEUE: []}
        for scope in scopes:
            start, _, pattern = scope.partition(":")
            if start in patterns and pattern:
                patterns[start].append(pattern)
            elif scope not in (READ, OPERATE):
                raise ConfigError(
                    f"{scope!r:.60} is no scope of an API key: read, operate, schedule:PATTERN as "
                    "in schedule:order.*, or queue:PATTERN"
                )
        rights = frozenset({READ, OPERATE} & set(scopes))
        if not rights and not patterns[SCHEDULE]:
            raise ConfigError("an API key needs a scope: read, operate or schedule:PATTERN")
        return cls(check_actor(name), rights, tuple(patterns[SCHEDULE]), tuple(patterns[QUEUE]))

    def covers(self, tag: str) -> bool:
        """Return whether the key may schedule, read and change tasks of a tag.

        The pattern `*` does not cover the tags of callbacks, since they send requests to any host:
        a pattern has to name them. No pattern covers the rows of Celery tasks.
        """
        is_own = tag.startswith(OWN_PREFIX)
        return not tag.startswith(CELERY_PREFIX) and any(
            fnmatchcase(tag, pattern)
            for pattern in self.tags
            if not is_own or pattern.startswith(OWN_PREFIX)
        )

    def may_name(self, queue: str) -> bool:
        return any(fnmatchcase(queue, pattern) for pattern in self.queues)


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
        self._by_hash: dict[str, ApiKey] = {}
        for name, entry in entries.items():
            try:
                self._by_hash[str(entry["hash"])] = ApiKey.of(name, entry["scopes"])
            except (KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"the API key {name!r:.60} is incomplete: {error!r}") from error

    def find(self, presented: str) -> ApiKey | None:
        """Return the key that a caller presents, or None if it is unknown."""
        return self._by_hash.get(_hash(presented))


class ApiKeyFile(EntryFile[ApiKeys]):
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
        super().__init__(path, "keys", ApiKeys, "API keys")

    def find(self, presented: str) -> ApiKey | None:
        return self.content().find(presented)

    def create(self, name: str, scopes: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """Store a new key. Return the key, which is stored nowhere, and its entry."""
        if name in self.entries:
            raise ConfigError(f"{self.path} has an API key {name!r:.60} already: choose a name")
        key, entry = new_entry(scopes)
        ApiKeys({name: entry})  # raises the errors of a wrong name
        self.write({**self.entries, name: entry})
        return key, entry


def new_entry(scopes: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return a new key, and the entry that recognizes it.

    Parameters
    ----------
    scopes
        `read`, `operate`, `schedule:PATTERN` and `queue:PATTERN`.
    """
    ApiKey.of("new", scopes)  # raises the error of a wrong scope
    key = f"{KEY_PREFIX}_{secrets.token_urlsafe(32)}"
    return key, {"hash": _hash(key), "scopes": list(scopes)}


def _hash(key: str) -> str:
    # A key of 256 random bits cannot be guessed, so a salt or a slow hash would add nothing.
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
