"""Versions of the bodies of a tag: rows of an older version are upgraded when they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from delaytasks.core.errors import BodyRefusedError
from delaytasks.core.number_checks import is_integer
from delaytasks.core.text import shown

#: The version of bodies that were stored without one.
FIRST_VERSION = 1
MAX_VERSION = 1_000_000
#: Makes a body of the next version from a body of one version.
Upgrade = Callable[[Any], Any]


class BodyVersions:
    """The version of the bodies that a processor takes, and the upgrades of older ones."""

    def __init__(self, tag: str, version: int, upgrades: Mapping[int, Upgrade]) -> None:
        self._tag = tag
        self.version = check_version(version)
        for number in upgrades:
            if not is_integer(number, FIRST_VERSION, version - 1):
                raise ValueError(
                    f"upgrades of {tag!r}: {shown(number)} is no version before version={version}"
                )
        self._upgrades = dict(upgrades)
        first = min(upgrades, default=version)
        if missing := sorted(set(range(first, version)) - upgrades.keys()):
            raise ValueError(
                f"upgrades of {tag!r} do not lead to version {version}: there is none from "
                f"version {missing[0]}"
            )

    @classmethod
    def of(
        cls, tag: str, version: int | None, upgrades: Mapping[int, Upgrade] | None
    ) -> BodyVersions | None:
        """Return the versions that the options of a processor mean; None without a version."""
        if version is not None:
            return cls(tag, version, upgrades or {})
        if upgrades:
            raise ValueError(f"the processor of {tag!r} has upgrades and no version: say version=…")
        return None

    def is_newer(self, version: int) -> bool:
        """Whether only newer code can run a body of this version."""
        return version > self.version

    def upgraded(self, body: Any, version: int) -> Any:
        """Return the body as the processor takes it.

        Raises
        ------
        BodyRefusedError
            If there is no upgrade from this version. Errors of upgrades are raised as they are.
        """
        if version < self.version and version not in self._upgrades:
            raise BodyRefusedError(
                f"the body of a task of tag {self._tag!r} has version {version}, and its "
                f"processor has version {self.version} and no upgrade from {version}: add one"
            )
        for number in range(version, self.version):
            body = self._upgrades[number](body)
        return body


def check_version(version: object) -> int:
    if not is_integer(version, FIRST_VERSION, MAX_VERSION):
        raise ValueError(f"the version of a body is an integer from 1, not {shown(version)}")
    return version
