"""The versions of installed packages, and errors for those that are missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata

from delaytasks.core.errors import ConfigError


@cache
def installed_version(package: str = "delaytasks") -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def needs_extra(extra: str, what: str = "this command") -> Iterator[None]:
    """Report a module that cannot be imported as a `ConfigError` that names the extra."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"{what} needs more packages ({error.name}): pip install 'delaytasks[{extra}]'"
        ) from error
