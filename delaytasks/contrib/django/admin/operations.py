"""The bulk operations in the admin, and their undo."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.db import transaction

from delaytasks.contrib.django.admin.task_actions import actor_name, answer_soon
from delaytasks.contrib.django.instance import project_delays
from delaytasks.core.errors import DelayTaskError


class BulkOperationRowAdmin(admin.ModelAdmin):
    """Lists the entries of the audit table. A cancel or a reschedule can be undone."""

    list_display = ("started_at", "action", "actor", "state", "matched", "changed", "refused",
                    "filter")  # fmt: skip
    list_filter = ("action", "state")
    search_fields = ("actor",)
    ordering = ("-id",)
    actions = ("undo",)
    show_full_result_count = False

    def has_add_permission(self, *_: Any, **__: Any) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def has_undo_permission(self, request: Any) -> bool:
        return bool(request.user.has_perm("delaytasks.change_bulkoperationrow"))

    # The operation runs on another connection, which SQLite would let wait for a transaction.
    @transaction.non_atomic_requests(using=project_delays().alias)
    def changelist_view(self, request: Any, extra_context: Any = None) -> Any:
        return super().changelist_view(request, extra_context)

    @admin.action(description="Undo selected cancels and reschedules", permissions=["undo"])
    def undo(self, request: Any, queryset: Any) -> None:
        delays = project_delays()
        for id in queryset.values_list("pk", flat=True):
            work = partial(delays.undo, id, actor=actor_name(request))
            try:
                result = answer_soon(self, request, work)
            except DelayTaskError as error:
                self.message_user(request, str(error), messages.ERROR)
                continue
            if result is not None:
                text = (
                    f"{result.changed:,} tasks are as before, {result.refused:,} have moved since."
                )
                self.message_user(request, text, messages.SUCCESS)
