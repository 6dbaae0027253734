"""The versions of installed packages."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def installed_version(package: str = "delaytasks") -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
