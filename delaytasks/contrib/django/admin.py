"""Delayed tasks in Django's admin: a list, the page of a task, and three actions.

The pages use Django's classes for their looks only. The tasks come from `find`, whose cursor is a
position in an index, and the actions are those operations of the table that change many tasks. The
mounted console has the rest: policies, schedules, statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, cast

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList
from django.db import transaction
from django.template.defaultfilters import date as date_text
from django.template.response import TemplateResponse
from django.utils.html import format_html, format_html_join
from django.utils.timezone import get_current_timezone, localtime

from delaytasks.contrib.django.instance import project_delays
from delaytasks.contrib.django.models import DelayTaskRow
from delaytasks.model.errors import DelayTaskError, InvalidInputError, TaskNotFoundError
from delaytasks.model.filters import MAX_IDS
from delaytasks.model.inputs import ACTOR_LENGTH, check_id, parse_instant
from delaytasks.model.moves import MOVES, Status
from delaytasks.model.task import DelayedTask, Page
from delaytasks.model.text import count, one_line
from delaytasks.operate.operations import OPERATIONS, Operation
from delaytasks.operate.task_calls import (
    SearchTimeoutError,
    error_filter,
    find_tasks,
    pretty_body,
    pretty_result,
)
from delaytasks.operate.texts import last_line, show_from_now
from delaytasks.runtime import runtime_of

__all__ = ["DelayTaskRowAdmin"]

#: The name of the cursor in the address of a page.
CURSOR = "cursor"
NOTHING_SHOWN = "–"
ERROR_LENGTH = 120
#: Seconds after which a search ends, since the error text has no index.
SEARCH_S = 5.0


def row_of(task: DelayedTask) -> DelayTaskRow:
    """Return the row of a task for the admin's pages, which read the attribute `task`."""
    same = "id tag status queue priority runs lapses worker".split()
    same += "expected_time create_time execution_time update_time lease_until".split()
    row = DelayTaskRow(**{name: getattr(task, name) for name in same})
    row.task = task
    return row


# -- find -----------------------------------------------------------------------------------------


class StatusFilter(admin.SimpleListFilter):
    title = parameter_name = "status"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        return [(status.name, status.name) for status in Status]

    def queryset(self, request: Any, queryset: Any) -> Any:
        return queryset  # `TaskList` reads the value


class TagFilter(StatusFilter):
    title = parameter_name = "tag"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        tags = (spec.tag for spec in runtime_of(project_delays()).registry)
        return [(tag, tag) for tag in sorted(tags) if not tag.startswith("delaytasks.")]

    def has_output(self) -> bool:
        return True  # a link of the project may name a tag that this process does not know


class TaskList(ChangeList):
    """The page of tasks. `next_page` is the query string of the next one."""

    next_page: str | None

    def get_queryset(self, request: Any, exclude_parameters: Any = None) -> Any:
        """Return a queryset that is not evaluated."""
        for parameters in (self.params, self.filter_params):
            parameters.pop(CURSOR, None)
        return super().get_queryset(request, exclude_parameters)

    def get_results(self, request: Any) -> None:
        try:
            page = self._page(request.GET.get(CURSOR) or None)
        except (InvalidInputError, SearchTimeoutError) as error:
            messages.error(request, str(error))
            raise IncorrectLookupParameters(str(error)) from error
        self.result_list = [row_of(task) for task in page]
        self.result_count = len(self.result_list)
        self.next_page = page.cursor and self.get_query_string({CURSOR: page.cursor})
        self.full_result_count, self.show_full_result_count = None, False
        self.show_admin_actions = bool(self.result_list)
        self.can_show_all, self.multi_page, self.paginator = False, True, None

    def _page(self, cursor: str | None) -> Page:
        """Find the text in the search field: an id, a key, or else a part of the error text."""
        text, size = self.query.strip(), self.list_per_page
        values = {spec.parameter_name: spec.value() for spec in self.filter_specs}
        filters = {name: value for name, value in values.items() if value}
        is_newest_first = "asc" not in self.get_ordering_field_columns().values()

        def find(**more: Any) -> Page:
            where, of = cast(Any, {**filters, **more}), runtime_of(project_delays())
            return find_tasks(of, where, cursor, size, is_newest_first, None, SEARCH_S)

        if not text:
            return find()
        for names_task in ({"ids": [text]}, {"key": text}):
            with suppress(InvalidInputError):  # no id, or too long for a key
                if (found := find(**names_task)).tasks:
                    return found
        return find(status=filters.get("status", Status.FAILED), error=error_filter(text))


# -- act ------------------------------------------------------------------------------------------

#: The operations on many tasks, as actions on those that are selected.
ACTIONS = [each for each in OPERATIONS.values() if each.bulk is not None]


def _can_move(operation: Operation, task: DelayedTask) -> bool:
    return task.status in MOVES[operation.name].sources


def _admin_action(operation: Operation) -> Callable[..., Any]:
    """Return the function that Django's admin calls for an action."""
    description = f"{operation.name.capitalize()} selected tasks"

    @admin.action(description=description, permissions=["operate"])
    def act(model_admin: Any, request: Any, queryset: Any) -> Any:
        step = _perform if "asked_at" in request.POST else _question
        try:
            return step(model_admin, request, operation)
        except DelayTaskError as error:
            model_admin.message_user(request, str(error), messages.ERROR)
            return None

    act.__name__ = operation.name
    decorated: Callable[..., Any] = act
    return decorated


def _question(model_admin: Any, request: Any, operation: Operation) -> Any:
    """Return the page that shows which of the selected tasks would change."""
    now = runtime_of(project_delays()).store.database.now()
    selected = request.POST.getlist(ACTION_CHECKBOX_NAME)
    tasks = project_delays().find(ids=selected, limit=MAX_IDS)
    movable = [task for task in tasks if _can_move(operation, task)]
    if not movable:
        sources = " or ".join(sorted(each.name for each in MOVES[operation.name].sources))
        raise InvalidInputError(f"{operation.name}: no selected task is {sources}", "status")
    context = {
        **model_admin.admin_site.each_context(request),
        "opts": model_admin.opts,
        "media": model_admin.media,
        "title": operation.name.capitalize(),
        "operation": operation,
        "fields": operation.fields,
        "checkbox": ACTION_CHECKBOX_NAME,
        "asked_at": now.isoformat(),
        "tasks": movable,
        "left": len(tasks) - len(movable),
    }
    return TemplateResponse(request, "admin/delaytasks/delaytaskrow/confirm.html", context)


def _perform(model_admin: Any, request: Any, operation: Operation) -> None:
    """Change the selected tasks that have not moved since the user saw them."""
    assert operation.bulk is not None
    result = operation.bulk(
        project_delays(),
        **operation.parse(request.POST.dict(), get_current_timezone()),
        ids=request.POST.getlist(ACTION_CHECKBOX_NAME),
        status=MOVES[operation.name].sources,
        updated_until=parse_instant(request.POST["asked_at"]),
        actor=one_line(request.user.get_username(), ACTOR_LENGTH - 1),
    )
    left = len(set(request.POST.getlist(ACTION_CHECKBOX_NAME))) - result.changed
    text = f"{count(result.changed, 'task was', 'tasks were')} {operation.done}."
    if left:
        text += f" {left} moved in the meantime, and stayed as they are."
    model_admin.message_user(request, text, messages.WARNING if left else messages.SUCCESS)


# -- show -----------------------------------------------------------------------------------------


def _instant(instant: datetime | None) -> str:
    """Return an instant in Django's current time zone."""
    if instant is None:
        return NOTHING_SHOWN
    return str(date_text(localtime(instant), "Y-m-d H:i:s T"))


def _text(text: str | None) -> Any:
    """Return a text of several lines; HTML in it is escaped."""
    return format_html('<pre class="delays-text">{}</pre>', text) if text else NOTHING_SHOWN


def _attempts(task: DelayedTask) -> Any:
    """Return a line for each failed attempt, which opens its traceback."""
    shown = "<details><summary>{}. {} to {} on {}: {}</summary>{}</details>"
    rows = (
        (
            each.number,
            _instant(each.began),
            _instant(each.ended),
            each.worker or NOTHING_SHOWN,
            last_line(each.error, ERROR_LENGTH),
            _text(each.error),
        )
        for each in project_delays().get(task, attempts=True).attempts
    )
    return format_html_join("", shown, rows) or NOTHING_SHOWN


def _column(label: str, show: Callable[[DelayedTask], Any], **display: Any) -> Any:
    """Return the method for a column of the list, or for a field of a task's page."""
    return admin.display(description=label, **display)(lambda _, row: show(row.task))


def _status(task: DelayedTask) -> Any:
    name = task.status.name
    return format_html('<span class="delays-status delays-{}">{}</span>', name.lower(), name)


def _due(task: DelayedTask) -> Any:
    shown = show_from_now(task.due, runtime_of(project_delays()).clock.now())
    return format_html('<span title="{}">{}</span>', _instant(task.due), shown)


def _last_error(task: DelayedTask) -> str:
    return last_line(task.error, ERROR_LENGTH) if task.error else ""


#: Bodies may contain data of customers, so the permission to view tasks does not show them.
_FOR_OPERATORS = (("Content", {"fields": ("body", "result_shown", "meta_shown")}),)
_TIMES = ("due_at", "next_try", "create_time", "execution_time", "update_time", "lease_until")


@admin.register(DelayTaskRow)
class DelayTaskRowAdmin(admin.ModelAdmin):
    """Lists and shows tasks. Even a superuser cannot add, edit or delete a row.

    The permission `change` allows the actions, which call the methods of `DelayTasks`.

    Examples
    --------
    >>> admin.site.unregister(DelayTaskRow)
    >>> admin.site.register(DelayTaskRow, DelayTaskRowAdmin)
    """

    list_display = ("id", "status_shown", "tag", "key", "due", "runs", "queue", "last_error")
    list_filter = (StatusFilter, TagFilter)
    list_per_page = 100
    ordering = ("-expected_time",)
    sortable_by = ("due",)
    #: Shows the search field; `TaskList` searches.
    search_fields = ("id",)
    search_help_text = "An id, a key, or a part of the error text (* stands for any text)"
    show_facets = admin.ShowFacets.NEVER
    actions = [_admin_action(each) for each in ACTIONS]
    change_list_template = "admin/delaytasks/delaytaskrow/change_list.html"
    change_form_template = "admin/delaytasks/delaytaskrow/change_form.html"
    fieldsets = (
        (None, {"fields": ("id", "status_shown", "tag", "key", "queue", "priority")}),
        ("Times", {"fields": _TIMES}),
        ("Runs", {"fields": ("runs", "lapses", "worker", "error", "failed_attempts")}),
    )

    class Media:
        css = {"all": ("delaytasks/admin.css",)}

    status_shown = _column("status", _status)
    key = _column("key", lambda task: task.key or NOTHING_SHOWN)
    due = _column("due", _due, ordering="expected_time")
    last_error = _column("error", _last_error)
    due_at = _column("due", lambda task: _instant(task.due))
    next_try = _column("next try", lambda task: _instant(task.due_time and task.expected_time))
    error = _column("error", lambda task: _text(task.error))
    failed_attempts = _column("failed attempts", _attempts)
    body = _column("body", lambda task: _text(pretty_body(task)))
    result_shown = _column("result", lambda task: _text(pretty_result(task)))
    meta_shown = _column(
        "meta", lambda task: _text("\n".join(f"{name}={text}" for name, text in task.meta.items()))
    )

    def has_add_permission(self, *_: Any, **__: Any) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def has_operate_permission(self, request: Any) -> bool:
        return bool(request.user.has_perm("delaytasks.change_delaytaskrow"))

    def get_changelist(self, request: Any, **_: Any) -> type[TaskList]:
        return TaskList

    def get_search_results(self, request: Any, queryset: Any, search_term: str) -> Any:
        return queryset, False

    def get_object(self, request: Any, object_id: str, from_field: Any = None) -> Any:
        try:
            return row_of(project_delays().get(check_id(object_id)))
        except (InvalidInputError, TaskNotFoundError):
            return None

    def get_fieldsets(self, request: Any, obj: Any = None) -> Any:
        return self.fieldsets + (_FOR_OPERATORS if self.has_operate_permission(request) else ())

    def get_readonly_fields(self, request: Any, obj: Any = None) -> list[str]:
        return [name for _, options in self.get_fieldsets(request) for name in options["fields"]]

    def response_action(self, request: Any, queryset: Any) -> Any:
        try:
            for id in request.POST.getlist(ACTION_CHECKBOX_NAME):
                check_id(id)  # Django answers 500 if an id is no number
        except InvalidInputError as error:
            self.message_user(request, str(error), messages.ERROR)
            return None
        return super().response_action(request, queryset)

    # An action writes log entries on another connection, which SQLite would let wait for the
    # transaction of ATOMIC_REQUESTS.
    @transaction.non_atomic_requests(using=project_delays().alias)
    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        return super().changelist_view(request, extra_context)

    def change_view(
        self, request: Any, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        row, actions = self.get_object(request, object_id), list[str]()
        if row is not None and self.has_operate_permission(request):
            actions = [each.name for each in ACTIONS if _can_move(each, row.task)]
        return super().change_view(
            request, object_id, form_url, {**(extra_context or {}), "task_actions": actions}
        )
