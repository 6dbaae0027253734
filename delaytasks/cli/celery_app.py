"""Finds the Celery app that the user names, and reports errors of its modules."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from delaytasks.cli.output import Failure, is_json
from delaytasks.core.errors import ConfigError, DelayTaskError


def find_app(name: str) -> Any:
    """Return the Celery app that `celery -A name` finds."""
    from celery import Celery
    from celery.app.utils import find_app as find

    # Like `celery`, find modules in the current folder.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    remedy = "; run the command in the folder of the module, or set PYTHONPATH"
    with import_errors(f"the app {name!r}", [name.partition(":")[0]], remedy):
        try:
            found = find(name)
        except AttributeError as error:
            raise ConfigError(
                f"{name!r} has no Celery app: {error}; name it, as -A package.module:app"
            ) from None
    if not isinstance(found, Celery):
        kind = type(found).__name__
        raise ConfigError(
            f"{name!r} is no Celery app but a {kind}; name it, as -A package.module:app"
        )
    return found


@contextmanager
def import_errors(what: str, modules: Iterable[str], remedy: str = "") -> Iterator[None]:
    """Report an error in a module of the user as a `ConfigError`, with its traceback.

    If one of `modules` is missing, the message ends with `remedy`.
    """
    try:
        yield
    except DelayTaskError:
        raise
    except Exception as error:
        message = f"importing {what} failed: {type(error).__name__}: {error}"
        # If the name of the module or of its package is mistyped, a traceback adds nothing.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        is_name_wrong = any(f"{module}.".startswith(f"{missing}.") for module in modules)
        details = "" if is_name_wrong else traceback.format_exc()
        message += remedy if is_name_wrong else ""
        ctx = click.get_current_context()
        raise Failure(ConfigError(message), is_json(ctx), details) from error
