"""How an action of a viewer is done: audited, reported, and followed by the page it came from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flask import flash, redirect, request
from werkzeug.wrappers import Response

from delaytasks.console.requests import safe_next, state, viewer
from delaytasks.core.errors import DelayTaskError
from delaytasks.wiring import wiring_of

logger = logging.getLogger(__name__)


def act(action: str, what: dict[str, Any], do: Callable[[], str]) -> Response:
    """Do one action, write its audit entry, and return to the page it came from.

    Parameters
    ----------
    action
        The name in the audit table.
    what
        The task, tag, queue or schedule, as a JSON value.
    do
        Does it, and returns a sentence for the viewer.
    """
    try:
        sentence, error = do(), None
    except (DelayTaskError, TypeError, ValueError) as problem:
        sentence, error = str(problem), problem
    _record(action, what, error is not None)
    flash(sentence, "good" if error is None else "bad")
    state().cache.forget()
    return back()


def back() -> Response:
    return redirect(safe_next(request.form.get("next")), 303)


def _record(action: str, what: dict[str, Any], is_refused: bool) -> None:
    actor = viewer().name
    logger.info("console: %s by %s: %r%s", action, actor, what, " (refused)" if is_refused else "")
    try:
        wiring_of(state().delays).bulk.record(action, what, actor, is_refused=is_refused)
    except DelayTaskError:
        # The action itself may be done, and the log has it.
        logger.exception("console: the audit entry of %s could not be written", action)
