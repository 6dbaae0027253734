"""The admin of tasks: read-only pages, with actions for users who may change tasks."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db import transaction

from delaytasks.contrib.django.admin.task_actions import TASK_ACTIONS, admin_action
from delaytasks.contrib.django.admin.task_html import (
    ERROR_LENGTH,
    attempts_html,
    distance_html,
    instant_html,
    key_html,
    status_html,
    text_html,
)
from delaytasks.contrib.django.admin.task_list import (
    DueFilter,
    QueueFilter,
    StatusFilter,
    TagFilter,
    TaskList,
    row_of,
)
from delaytasks.contrib.django.instance import project_delays
from delaytasks.core.errors import InvalidIdError, TaskNotFoundError
from delaytasks.core.ids import check_id
from delaytasks.core.states import MOVES
from delaytasks.core.task_json import pretty
from delaytasks.core.text import last_line
from delaytasks.runtime import runtime_of

#: Bodies may contain data of customers, so the permission to view tasks does not show them.
_FOR_OPERATORS = (("Content", {"fields": ("body", "result_shown", "meta_shown")}),)


class DelayTaskRowAdmin(admin.ModelAdmin):
    """Lists and shows tasks. Even a superuser cannot add, edit or delete a row.

    The permission `change` allows the actions, which call the functions of delaytasks.

    Examples
    --------
    >>> admin.site.unregister(DelayTaskRow)
    >>> admin.site.register(DelayTaskRow, DelayTaskRowAdmin)
    """

    list_display = ("id", "status_shown", "tag", "key", "due", "attempts", "queue", "last_error")
    list_filter = (StatusFilter, DueFilter, TagFilter, QueueFilter)
    list_per_page = 100
    ordering = ("-expected_time",)
    sortable_by = ("due",)
    #: Shows the search field; `TaskSearch` searches.
    search_fields = ("id",)
    search_help_text = "An id, a key, or a part of the error text (* stands for any text)"
    show_facets = admin.ShowFacets.NEVER
    actions = [admin_action(each) for each in TASK_ACTIONS]
    change_list_template = "admin/delaytasks/delaytaskrow/change_list.html"
    change_form_template = "admin/delaytasks/delaytaskrow/change_form.html"
    fieldsets = (
        (None, {"fields": ("id", "status_shown", "tag", "key", "queue", "priority")}),
        (
            "Times",
            {
                "fields": (
                    "due_at",
                    "next_try",
                    "create_time",
                    "execution_time",
                    "update_time",
                    "lease_until",
                )
            },
        ),
        ("Runs", {"fields": ("attempts", "lapses", "worker", "error", "failed_attempts")}),
    )

    class Media:
        css = {"all": ("delaytasks/admin.css",)}

    # -- permissions ------------------------------------------------------------------------------

    def has_add_permission(self, *_: Any, **__: Any) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def has_operate_permission(self, request: Any) -> bool:
        return bool(request.user.has_perm("delaytasks.change_delaytaskrow"))

    # -- pages ------------------------------------------------------------------------------------

    def get_changelist(self, request: Any, **_: Any) -> type[TaskList]:
        return TaskList

    def get_search_results(self, request: Any, queryset: Any, search_term: str) -> Any:
        return queryset, False

    def get_object(self, request: Any, object_id: str, from_field: Any = None) -> Any:
        try:
            return row_of(project_delays().get(check_id(object_id)))
        except (InvalidIdError, TaskNotFoundError):
            return None

    def get_fieldsets(self, request: Any, obj: Any = None) -> Any:
        return self.fieldsets + (_FOR_OPERATORS if self.has_operate_permission(request) else ())

    def get_readonly_fields(self, request: Any, obj: Any = None) -> list[str]:
        return [name for _, options in self.get_fieldsets(request) for name in options["fields"]]

    # An action writes audit entries on another connection, which SQLite would let wait for the
    # transaction of ATOMIC_REQUESTS.
    @transaction.non_atomic_requests(using=project_delays().alias)
    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        return super().changelist_view(request, extra_context)

    def change_view(
        self, request: Any, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> Any:
        row = self.get_object(request, object_id)
        may_operate = row is not None and self.has_operate_permission(request)
        actions = [
            each
            for each in TASK_ACTIONS
            if may_operate and row.task.status in MOVES[each.move].sources
        ]
        return super().change_view(
            request, object_id, form_url, {**(extra_context or {}), "task_actions": actions}
        )

    # -- columns and fields -----------------------------------------------------------------------

    @admin.display(description="status")
    def status_shown(self, row: Any) -> Any:
        return status_html(row.task.status)

    def key(self, row: Any) -> Any:
        return key_html(row.task, self.admin_site.name)

    @admin.display(ordering="expected_time")
    def due(self, row: Any) -> Any:
        return distance_html(row.task.due, runtime_of(project_delays()).clock.now())

    @admin.display(description="error")
    def last_error(self, row: Any) -> str:
        return last_line(row.task.error, ERROR_LENGTH) if row.task.error else ""

    @admin.display(description="due")
    def due_at(self, row: Any) -> Any:
        return instant_html(row.task.due)

    def next_try(self, row: Any) -> Any:
        return instant_html(row.task.expected_time if row.task.due_time else None)

    def error(self, row: Any) -> Any:
        return text_html(row.task.error)

    def failed_attempts(self, row: Any) -> Any:
        return attempts_html(project_delays().attempts(row.task))

    def body(self, row: Any) -> Any:
        return text_html(pretty(lambda: row.task.body, row.task.body_json))

    @admin.display(description="result")
    def result_shown(self, row: Any) -> Any:
        return text_html(pretty(lambda: row.task.result, row.task.result_json or ""))

    @admin.display(description="meta")
    def meta_shown(self, row: Any) -> Any:
        return text_html("\n".join(f"{name}={value}" for name, value in row.task.meta.items()))
