"""The bulk operations in the admin."""

from __future__ import annotations

from typing import Any

from django.contrib import admin


class BulkOperationRowAdmin(admin.ModelAdmin):
    """Lists the entries of the audit table."""

    list_display = ("started_at", "action", "actor", "state", "matched", "changed", "refused",
                    "filter")  # fmt: skip
    list_filter = ("action", "state")
    search_fields = ("actor",)
    ordering = ("-id",)
    show_full_result_count = False

    def has_add_permission(self, *_: Any, **__: Any) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission
