"""Tasks in Django's admin, read-only. The project registers the model if it wants that."""

from __future__ import annotations

from typing import Any

from django.contrib import admin


class DelayTaskRowAdmin(admin.ModelAdmin):
    """Lists and shows tasks. Even a superuser cannot add, change or delete them.

    Examples
    --------
    >>> admin.site.register(DelayTaskRow, DelayTaskRowAdmin)
    """

    list_display = ("id", "tag", "status", "expected_time", "queue", "attempts")
    list_filter = ("status", "queue")
    show_full_result_count = False  # which would count the whole table for each page

    def has_add_permission(self, *_: Any, **__: Any) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission
