"""Cancel, run now, reschedule and run again. The admin counts the tasks first, and then acts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from django.contrib import messages
from django.contrib.admin import action
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db import connections
from django.http import HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from delaytasks.contrib.django.admin.task_counts import count_tasks
from delaytasks.contrib.django.admin.task_list import row_of
from delaytasks.contrib.django.instance import DjangoDelays, project_delays
from delaytasks.core.bounded_calls import within
from delaytasks.core.bulk import BulkResult, bulk_filter_of
from delaytasks.core.durations import parse_duration
from delaytasks.core.errors import (
    DelayTaskError,
    InvalidInputError,
    InvalidQueryError,
    TaskStateError,
)
from delaytasks.core.ids import check_id
from delaytasks.core.inputs import ACTOR_LENGTH
from delaytasks.core.states import MOVES
from delaytasks.core.task import DelayTask
from delaytasks.core.text import one_line
from delaytasks.operations.bulk import record_action
from delaytasks.runtime import runtime_of

logger = logging.getLogger(__name__)
#: Seconds after which the page answers. A longer bulk operation continues in its thread.
ACTION_ANSWER_S = 2.0


class TaskAction(NamedTuple):
    """An action of the list of tasks."""

    name: str
    #: The move of `core/states.py`.
    move: str
    words: str
    done: str
    asks_delay: bool = False


TASK_ACTIONS = (
    TaskAction("cancel_tasks", "cancel", "Cancel", "cancelled"),
    TaskAction("run_tasks_now", "reschedule", "Run now", "due now"),
    TaskAction("reschedule_tasks", "reschedule", "Reschedule", "rescheduled", asks_delay=True),
    TaskAction("rerun_tasks", "rerun", "Run again", "waiting again"),
)


def actor_name(request: Any) -> str:
    """Return the name of the user for the audit table."""
    return one_line(request.user.get_username(), ACTOR_LENGTH - 1)


def admin_action(which: TaskAction) -> Callable[..., Any]:
    """Return the function that Django's admin calls for an action."""

    @action(description=f"{which.words} selected tasks", permissions=["operate"])
    def act(model_admin: Any, request: Any, queryset: Any) -> Any:
        run = _ActionRequest(model_admin, request, which)
        try:
            return run.answer()
        except DelayTaskError as error:
            model_admin.message_user(request, str(error), messages.ERROR)
            return None

    act.__name__ = which.name
    decorated: Callable[..., Any] = act
    return decorated


class _ActionRequest:
    """One request for an action: the question at first, and the action after the answer."""

    def __init__(self, model_admin: Any, request: Any, which: TaskAction) -> None:
        self._admin = model_admin
        self._request = request
        self._which = which
        self._posted = request.POST
        self._is_for_all = request.POST.get("select_across") == "1"
        self._delays: DjangoDelays = project_delays()

    def answer(self) -> Any:
        if self._posted.get("is_confirmed") != "yes":
            return self._question_for_all() if self._is_for_all else self._question_for_selected()
        if self._is_for_all:
            self._move_all()
            return None
        self._move_selected()
        if self._posted.get("page") != "task":
            return None
        id, site = check_id(self._posted.get(ACTION_CHECKBOX_NAME)), self._admin.admin_site.name
        view = "admin:delaytasks_delaytaskrow_change"
        return HttpResponseRedirect(reverse(view, args=(id,), current_app=site))

    # -- ask --------------------------------------------------------------------------------------

    def _question_for_selected(self) -> Any:
        selected = self._posted.getlist(ACTION_CHECKBOX_NAME)
        tasks = [self._delays.get(check_id(id)) for id in dict.fromkeys(selected)]
        movable = [task for task in tasks if task.status in MOVES[self._which.move].sources]
        if not movable:
            raise InvalidQueryError(f"{self._which.words}: no selected task is {self._sources()}")
        rows = [row_of(task) for task in movable]
        return self._page(
            count=len(movable), is_one=len(movable) == 1, rows=rows, left=len(tasks) - len(movable)
        )

    def _question_for_all(self) -> Any:
        which = bulk_filter_of(self._which.move, self._filters(), False)
        counted = count_tasks(self._delays, replace(which.where, status=which.movable))
        return self._page(count=counted, is_one=counted.tasks == 1, filter=which.where.as_json())

    def _page(self, **context: Any) -> Any:
        return TemplateResponse(
            self._request,
            "admin/delaytasks/delaytaskrow/confirm.html",
            {
                **self._admin.admin_site.each_context(self._request),
                "opts": self._admin.opts,
                "media": self._admin.media,
                "title": self._which.words,
                "which": self._which,
                "sources": self._sources(),
                "checkbox": ACTION_CHECKBOX_NAME,
                "is_for_all": self._is_for_all,
                "page": self._posted.get("page", ""),
                **context,
            },
        )

    def _sources(self) -> str:
        return " or ".join(sorted(each.name for each in MOVES[self._which.move].sources))

    def _filters(self) -> dict[str, Any]:
        filters: dict[str, Any] = self._admin.get_changelist_instance(self._request).search.filters
        if not filters:
            raise InvalidQueryError("choose a filter first, so that not all tasks are changed")
        return filters

    # -- act --------------------------------------------------------------------------------------

    def _move_selected(self) -> None:
        """Move the tasks that still have the versions that the user saw."""
        delay, changed, refused = self._delay(), list[int](), list[str]()
        for id, version in self._versions():
            try:
                task = self._move(id, version, delay)
            except TaskStateError as error:
                refused.append(str(error))
                continue
            changed.append(id)
            self._admin.log_change(self._request, row_of(task), f"{self._which.words}.")
        what = {"ids": changed, "refused": len(refused)}
        actor = actor_name(self._request)
        runtime = runtime_of(self._delays)
        record_action(runtime, self._which.name, what, actor, is_refused=not changed)
        self._report(len(changed), len(refused), f": {refused[0]}" if refused else "")

    def _move(self, id: int, version: int, delay: float) -> DelayTask:
        if self._which.move == "cancel":
            self._delays.cancel(id, version=version, strict=True)
            return self._delays.get(id)
        move = self._delays.rerun if self._which.move == "rerun" else self._delays.reschedule
        return move(id, delay, version=version)

    def _versions(self) -> Iterator[tuple[int, int]]:
        for text in self._posted.getlist("version"):
            id, _, version = text.partition(":")
            if not version.isdecimal():
                raise InvalidQueryError(f"{text!r:.40} is not a task and its version")
            yield check_id(id), int(version)

    def _delay(self) -> float:
        text = self._posted.get("delay", "") if self._which.asks_delay else "0"
        return parse_duration(text).total_seconds()

    def _move_all(self) -> None:
        options = {**self._filters(), "actor": actor_name(self._request)}
        delay, delays = self._delay(), self._delays

        def work() -> BulkResult:
            if self._which.move == "cancel":
                return delays.cancel_many(**options)
            is_rerun = self._which.move == "rerun"
            return (delays.rerun_many if is_rerun else delays.reschedule_many)(delay, **options)

        result = answer_soon(self._admin, self._request, work)
        if result is not None:
            self._report(result.changed, result.refused)

    def _report(self, changed: int, refused: int, reason: str = "") -> None:
        text = f"{changed:,} {'task is' if changed == 1 else 'tasks are'} {self._which.done}."
        if refused:
            text += f" {refused:,} refused{reason}"
        level = messages.WARNING if refused else messages.SUCCESS
        self._admin.message_user(self._request, text, level)


def answer_soon(
    model_admin: Any, request: Any, work: Callable[[], BulkResult]
) -> BulkResult | None:
    """Do a bulk operation in a thread, and return its result if it ends soon, else a message."""

    def run() -> BulkResult:
        try:
            return work()
        except InvalidInputError:  # the user's, and nothing was done
            raise
        except Exception:
            # The page may have answered already.
            logger.exception("a bulk operation of the admin failed")
            raise
        finally:
            connections.close_all()  # those of this thread

    try:
        return within(ACTION_ANSWER_S, run, is_kept=True)
    except TimeoutError:
        text = "The operation continues. The bulk operations show how far it has come."
        model_admin.message_user(request, text)
        return None
