"""Tasks, policies, recurring schedules and bulk operations in Django's admin.

tasks         the page of one task
task_list     the list of tasks: filters, search, pages
task_actions  cancel, run now, reschedule, run again: count first, then act
task_counts   numbers of tasks, estimated in large tables
task_html     a status, a body and failed attempts as HTML
policies      the pauses and limits
recurring     the recurring schedules
operations    the bulk operations
"""

from __future__ import annotations

from django.contrib import admin

from delaytasks.contrib.django.admin.operations import BulkOperationRowAdmin
from delaytasks.contrib.django.admin.policies import PolicyRowAdmin
from delaytasks.contrib.django.admin.recurring import RecurringScheduleRowAdmin
from delaytasks.contrib.django.admin.tasks import DelayTaskRowAdmin
from delaytasks.contrib.django.models import (
    BulkOperationRow,
    DelayTaskRow,
    PolicyRow,
    RecurringScheduleRow,
)

__all__ = [
    "BulkOperationRowAdmin", "DelayTaskRowAdmin", "PolicyRowAdmin", "RecurringScheduleRowAdmin",
]  # fmt: skip

admin.site.register(DelayTaskRow, DelayTaskRowAdmin)
admin.site.register(PolicyRow, PolicyRowAdmin)
admin.site.register(RecurringScheduleRow, RecurringScheduleRowAdmin)
admin.site.register(BulkOperationRow, BulkOperationRowAdmin)
