"""How an action of a viewer is done: audited, reported, and followed by the page it came from.

An action that is refused before it begins is audited as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from flask import Flask, Response, current_app, flash, g, redirect, request
from werkzeug.wrappers import Response as AnyResponse

from delaytasks.console.requests import safe_next, state, viewer
from delaytasks.console.task_filters import number_of
from delaytasks.console.viewers import Role
from delaytasks.core.errors import DelayTaskError
from delaytasks.operations.bulk import record_action
from delaytasks.runtime import runtime_of

logger = logging.getLogger(__name__)
#: The statuses of a refused action. The form of a request that is too large (413) cannot be read.
REFUSED = {400, 403, 404}
#: Fields that are not part of an audit entry. A body may contain secrets.
_LEFT_OUT = {"csrf", "next", "body", "version", "expected", "is_change"}
#: Fields of a refused form that are audited, and their characters: nobody has checked them.
MOST_FIELDS, MOST_CHARACTERS = 20, 200


def act(action: str, what: dict[str, Any], do: Callable[[], str]) -> AnyResponse:
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
    record(action, what, is_refused=error is not None)
    flash(sentence, "good" if error is None else "bad")
    state().cache.forget()
    return back()


def back() -> AnyResponse:
    return redirect(safe_next(request.form.get("next")), 303)


def record(action: str, what: dict[str, Any], *, is_refused: bool = False) -> None:
    """Log an action of the viewer, and write its audit entry."""
    actor = viewer().name
    logger.info("console: %s by %s: %r%s", action, actor, what, " (refused)" if is_refused else "")
    try:
        task = number_of(str(what.get("id", "")))
        record_action(
            runtime_of(state().delays), action, what, actor, is_refused=is_refused, task=task
        )
    except DelayTaskError:
        # The action itself may be done, and the log has it.
        logger.exception("console: the audit entry of %s could not be written", action)


def audit_refusals(app: Flask) -> None:
    """Let the app audit the actions that are refused: by role, token or origin, or as impossible.

    `act` answers with a redirect, so its refusals are not recorded twice.
    """
    app.after_request(_audit_refusal)


def _audit_refusal(response: Response) -> Response:
    if request.method == "POST" and response.status_code in REFUSED and g.get("viewer") is not None:
        view = current_app.view_functions.get(request.endpoint or "")
        if getattr(view, "console_role", Role.VIEW) > Role.VIEW:
            record(request.endpoint or "", _refused_form(), is_refused=True)
    return response


def _refused_form() -> dict[str, Any]:
    fields = {name: ", ".join(values) for name, values in request.form.lists()}
    fields |= request.view_args or {}
    shown = [(name, text) for name, text in fields.items() if text and name not in _LEFT_OUT]
    return {name[:MOST_CHARACTERS]: text[:MOST_CHARACTERS] for name, text in shown[:MOST_FIELDS]}
