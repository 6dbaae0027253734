"""Rewrites the commands in messages as the user called the command line."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from delaytasks.core.why import Explanation, Reason


class Hints:
    """Makes hints that the user can copy.

    Messages are written without knowledge of the caller, and name a command as `delaytasks rerun`,
    `delaytasks -A APP db` or `flask --app APP delays db`. The user may have called `delaytasks -A
    shop`, or `celery -A shop delays`.

    Parameters
    ----------
    command
        The beginning of the user's command line.
    names
        The names of all commands.
    app
        The Celery app if the user has named it.
    """

    def __init__(self, command: str, names: Collection[str], app: str | None = None) -> None:
        self.command = command
        self._app = app
        any_name = "|".join(map(re.escape, names))
        self._pattern = re.compile(
            rf"\b(?:delaytasks (?:-A APP )?|flask --app APP delays )(?=(?:{any_name})\b)"
        )

    def rewrite(self, message: str) -> str:
        """Return the message with its commands and options as the user would type them."""
        if self._app is not None:
            message = message.replace("celery -A … ", f"celery -A {self._app} ")
        message = message.replace("by tag= and key=", "by --tag and --key")
        return self._pattern.sub(lambda _: f"{self.command} ", message)

    def in_explanation(self, explanation: Explanation) -> Explanation:
        """Return the explanation with rewritten remedies."""
        return replace(explanation, reasons=[self._in_reason(one) for one in explanation.reasons])

    def _in_reason(self, reason: Reason) -> Reason:
        return reason._replace(remedy=self.rewrite(reason.remedy))
