"""The recurring schedules in the admin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from django import forms
from django.contrib import admin, messages
from django.utils.timezone import is_naive, make_aware

from delaytasks.contrib.django.admin.task_actions import actor_name
from delaytasks.contrib.django.admin.task_html import NOTHING_SHOWN, instant_html
from delaytasks.contrib.django.instance import project_delays
from delaytasks.contrib.django.models import RecurringScheduleRow
from delaytasks.core.errors import DelayTaskError, InvalidInputError, RecurringNotFoundError
from delaytasks.recurrence.definition import Definition, options_of, timing_options
from delaytasks.recurrence.recurring import checked
from delaytasks.recurrence.schedule import Missed, Overlap, RecurringSchedule, check_readable
from delaytasks.runtime import runtime_of

#: Occurrences that the page of a schedule shows.
SHOWN_OCCURRENCES = 5
_EDITED = ("tag", "body", "timing", "tz", "start_at", "jitter_s", "missed", "most_missed",
           "overlap", "queue", "priority", "is_paused")  # fmt: skip
_SHOWN_FIELDS = (
    "is_declared",
    "next_occurrences",
    "last_at",
    "last_task_id",
    "update_time",
    "updated_by",
)


class RecurringForm(forms.ModelForm):
    """The options of `recurring.set`. Retries, expiry, meta and the concurrency key stay."""

    body = forms.JSONField(
        required=False, widget=forms.Textarea(attrs={"rows": 5, "cols": 80}), help_text="JSON"
    )
    missed = forms.ChoiceField(required=False, choices=[(each, each) for each in get_args(Missed)])
    overlap = forms.ChoiceField(
        required=False, choices=[(each, each) for each in get_args(Overlap)]
    )

    class Meta:
        model = RecurringScheduleRow
        fields = ("name", *(name for name in _EDITED if name != "body"))
        help_texts = {
            "timing": "A cron expression such as 0 9 * * mon-fri, or an interval: every 5m.",
            "tz": "The time zone of a cron expression, such as Europe/Berlin.",
        }

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.stored = stored_schedule(self.instance.pk)
        if self.stored is not None:
            self.initial["body"] = readable_body(self.stored)
        #: The definition that was checked last.
        self.definition: Definition | None = None

    def clean(self) -> Any:
        cleaned: Any = super().clean()
        if self.errors or "timing" not in cleaned:  # only the pause is edited
            return cleaned
        name = cleaned.get("name", self.instance.pk)
        self.definition = definition_of(name, cleaned, self.stored)
        try:
            checked(runtime_of(project_delays()), self.definition)
        except InvalidInputError as error:
            raise forms.ValidationError(str(error)) from error
        return cleaned


def definition_of(
    name: str, values: dict[str, Any], stored: RecurringSchedule | None
) -> Definition:
    """Return the definition that a form contains, with the options of `stored` that it lacks."""
    start = values["start_at"]
    options: dict[str, Any] = {
        **({} if stored is None else options_of(stored, values["tag"], values["body"])),
        **timing_options(values["timing"]),
        "tz": values["tz"] or None,
        "start": make_aware(start) if start is not None and is_naive(start) else start,
        "jitter": values["jitter_s"],
        "most_missed": values["most_missed"],
        "queue": values["queue"] or None,
        "priority": values["priority"],
        **{each: values[each] for each in ("missed", "overlap") if values[each]},
    }
    cron = options.pop("cron", None)
    return Definition(name, values["tag"], values["body"], cron, options)  # type: ignore[arg-type]


def stored_schedule(name: str | None) -> RecurringSchedule | None:
    try:
        return project_delays().recurring.get(name) if name else None
    except RecurringNotFoundError:
        return None


def readable_body(schedule: RecurringSchedule) -> Any:
    """Return the body, or None if this process cannot decrypt or decode it."""
    try:
        return schedule.body
    except (ValueError, RecursionError):
        return None


class RecurringScheduleRowAdmin(admin.ModelAdmin):
    """Lists, changes and removes recurring schedules by the functions of delaytasks.

    A schedule that code declares can be paused and run, and is changed in the code.
    """

    form = RecurringForm
    list_display = ("name", "tag", "timing", "tz", "is_paused", "next_at", "last_at", "is_declared")
    list_filter = ("is_paused", "is_declared")
    search_fields = ("name", "tag")
    ordering = ("name",)
    actions = ("pause", "resume", "run_now")
    show_full_result_count = False

    # -- permissions ------------------------------------------------------------------------------

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        return bool(request.user.has_perm("delaytasks.change_recurringschedulerow"))

    def has_add_permission(self, request: Any) -> bool:
        return self.has_change_permission(request)

    def has_delete_permission(self, request: Any, obj: Any = None) -> bool:
        """A worker would add a declared schedule again."""
        return self.has_change_permission(request) and not (obj and obj.is_declared)

    def _can_edit(self, request: Any, obj: Any) -> bool:
        return self.has_change_permission(request) and (obj is None or _is_editable(obj))

    # -- pages ------------------------------------------------------------------------------------

    def get_fields(self, request: Any, obj: Any = None) -> tuple[str, ...]:
        if obj is None:
            return ("name", *_EDITED)
        edited: tuple[str, ...] = _EDITED
        if not self._can_edit(request, obj):
            edited = tuple(name for name in _EDITED if name != "body")
        return ("name", *edited, *_SHOWN_FIELDS)

    def get_readonly_fields(self, request: Any, obj: Any = None) -> tuple[str, ...]:
        if obj is None:
            return ()
        if self._can_edit(request, obj):
            return ("name", *_SHOWN_FIELDS)
        return tuple(name for name in self.get_fields(request, obj) if name != "is_paused")

    @admin.display(description="next occurrences")
    def next_occurrences(self, row: Any) -> str:
        schedule = stored_schedule(row.name)
        now = runtime_of(project_delays()).clock.now()
        try:
            found = [] if schedule is None else schedule.next(SHOWN_OCCURRENCES, now)
        except DelayTaskError:  # another program has written the timing
            found = []
        return ", ".join(map(instant_html, found)) or NOTHING_SHOWN

    # -- changes ----------------------------------------------------------------------------------

    def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
        recurring, actor, new = project_delays().recurring, actor_name(request), form.definition
        schedule = form.stored
        if new is not None:
            schedule = recurring.set(
                new.name, new.tag, new.body, cron=new.cron, actor=actor, **new.options
            )
        if form.cleaned_data["is_paused"] != schedule.is_paused:
            set_pause = recurring.pause if form.cleaned_data["is_paused"] else recurring.resume
            set_pause(obj.name, actor=actor)

    def delete_model(self, request: Any, obj: Any) -> None:
        project_delays().recurring.remove(obj.name, actor=actor_name(request))

    def delete_queryset(self, request: Any, queryset: Any) -> None:
        for row in queryset:
            self.delete_model(request, row)

    @admin.action(description="Pause selected schedules", permissions=["change"])
    def pause(self, request: Any, queryset: Any) -> None:
        recurring, actor = project_delays().recurring, actor_name(request)
        self._each(request, queryset, lambda name: recurring.pause(name, actor=actor), "paused")

    @admin.action(description="Resume selected schedules", permissions=["change"])
    def resume(self, request: Any, queryset: Any) -> None:
        recurring, actor = project_delays().recurring, actor_name(request)
        self._each(request, queryset, lambda name: recurring.resume(name, actor=actor), "resumed")

    @admin.action(description="Run selected schedules once now", permissions=["change"])
    def run_now(self, request: Any, queryset: Any) -> None:
        self._each(request, queryset, project_delays().recurring.run, "run once")

    def _each(self, request: Any, queryset: Any, act: Callable[[str], object], done: str) -> None:
        count = 0
        for name in queryset.values_list("pk", flat=True):
            try:
                act(name)
                count += 1
            except DelayTaskError as error:
                self.message_user(request, f"{name}: {error}", messages.ERROR)
        if count:
            self.message_user(request, f"Schedules {done}: {count}.", messages.SUCCESS)


def _is_editable(row: Any) -> bool:
    """Return whether code does not declare the schedule, and its body can be read."""
    schedule = stored_schedule(row.name)
    if row.is_declared or schedule is None:
        return False
    try:
        check_readable(schedule)
    except ValueError:
        return False
    return True
