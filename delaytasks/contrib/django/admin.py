"""Tasks in Django's admin, to look at. Nothing is registered here, so that a project decides what its admin shows."""

from __future__ import annotations

from typing import Any

from django.contrib import admin


class DelayTaskRowAdmin(admin.ModelAdmin):
    """Lists and shows tasks; nobody adds, changes or deletes them, not even a superuser.

    >>> admin.site.register(DelayTaskRow, DelayTaskRowAdmin)
    """

    list_display = ("id", "tag", "status", "expected_time", "queue", "attempts")
    list_filter = ("status", "queue")
    show_full_result_count = False  # a count of the whole table at each look

    def has_add_permission(self, *_: Any, **__: Any) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission
