"""The pauses and limits of tags and queues in the admin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import ChangeList
from django.db import transaction
from django.db.models import Q
from django.urls import reverse

from delaytasks.contrib.django.admin.task_actions import actor_name
from delaytasks.contrib.django.instance import project_delays
from delaytasks.contrib.django.models import PolicyRow
from delaytasks.core.errors import DelayTaskError, InvalidInputError
from delaytasks.core.policies import Policy, check_limit, named, parse_rate


def rate_text(row: Any) -> str | None:
    """Return the rate of a row as a form shows it."""
    return Policy("tag", row.name, rate=row.rate, rate_period_s=row.rate_period_s).rate_text


class PolicyForm(forms.ModelForm):
    """A pause and limits. The rate is a text such as 100/s."""

    rate_limit = forms.CharField(
        label="Rate",
        required=False,
        help_text="The most tasks that start in a period: 100/s, 30/m, 1000/1h30m.",
    )

    class Meta:
        model = PolicyRow
        fields = ("kind", "name", "is_paused", "concurrency", "key_concurrency")
        help_texts = {
            "concurrency": "The most tasks of the tag that run simultaneously.",
            "key_concurrency": "The most tasks of one concurrency key that run simultaneously.",
        }

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.initial["rate_limit"] = rate_text(self.instance)

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean()
        kind = cleaned.get("kind", self.instance.kind)
        name = cleaned.get("name", self.instance.name)
        rate = cleaned["rate_limit"] = cleaned.get("rate_limit") or None
        limits = [cleaned.get("concurrency"), cleaned.get("key_concurrency"), rate]
        try:
            named(*((name, None) if kind == "tag" else (None, name)))
            check_limit(limits[0], "concurrency")
            check_limit(limits[1], "key_concurrency")
            parse_rate(rate)
        except InvalidInputError as error:
            raise forms.ValidationError(str(error)) from error
        if kind == "queue" and limits != [None] * 3:
            raise forms.ValidationError("A queue can be paused, and limits are for tags.")
        return cleaned

    def validate_unique(self) -> None:
        """A tag and a queue may have the same name, and a policy that exists is changed."""


class PolicyList(ChangeList):
    def url_for_result(self, result: Any) -> str:
        view, site = "admin:delaytasks_policyrow_change", self.model_admin.admin_site
        return str(
            reverse(view, args=(quote(f"{result.kind}:{result.name}"),), current_app=site.name)
        )


class PolicyRowAdmin(admin.ModelAdmin):
    """Lists, changes and clears policies by the functions of delaytasks."""

    form = PolicyForm
    list_display = ("name", "kind", "is_paused", "concurrency", "key_concurrency", "rate_shown",
                    "update_time", "updated_by")  # fmt: skip
    list_filter = ("kind", "is_paused")
    search_fields = ("name",)
    ordering = ("kind", "name")
    actions = None  # they would name rows by the primary key of the model, which is no key
    show_full_result_count = False

    def has_change_permission(self, request: Any, obj: Any = None) -> bool:
        return bool(request.user.has_perm("delaytasks.change_policyrow"))

    def has_add_permission(self, request: Any) -> bool:
        return self.has_change_permission(request)

    has_delete_permission = has_change_permission

    def get_changelist(self, request: Any, **_: Any) -> type[PolicyList]:
        return PolicyList

    def get_queryset(self, request: Any) -> Any:
        """Return the policies without those that were cleared."""
        has_limit = Q(concurrency__isnull=False) | Q(key_concurrency__isnull=False)
        return (
            super()
            .get_queryset(request)
            .filter(Q(is_paused=True) | has_limit | Q(rate__isnull=False))
        )

    def get_object(self, request: Any, object_id: str, from_field: Any = None) -> Any:
        kind, _, name = object_id.partition(":")
        rows = self.get_queryset(request)
        # After an add, Django's own links have the name only.
        return rows.filter(kind=kind, name=name).first() or rows.filter(name=object_id).first()

    def get_readonly_fields(self, request: Any, obj: Any = None) -> tuple[str, ...]:
        return () if obj is None else ("kind", "name")

    @admin.display(description="rate")
    def rate_shown(self, row: Any) -> str | None:
        return rate_text(row)

    # Policies are written on another connection. It follows the commit of the page's transaction,
    # which SQLite would let it wait for.

    def save_model(self, request: Any, obj: Any, form: Any, change: bool) -> None:
        values, actor = dict(form.cleaned_data), actor_name(request)
        self._after_commit(request, partial(_set, obj.kind, obj.name, values, actor))

    def delete_model(self, request: Any, obj: Any) -> None:
        delays, which = project_delays(), {obj.kind: obj.name}
        clear = partial(delays.clear_policy, **which, actor=actor_name(request))
        self._after_commit(request, clear)

    def _after_commit(self, request: Any, write: Callable[[], object]) -> None:
        """Write a policy after the commit, or show why this failed.

        Limits and a pause are written one after the other, and an outcome may be unknown.
        """

        def attempt() -> None:
            try:
                write()
            except DelayTaskError as error:
                text = f"The policy may not have been changed completely: {error}"
                self.message_user(request, text, messages.ERROR)

        transaction.on_commit(attempt, using=project_delays().alias)


def _set(kind: str, name: str, values: dict[str, Any], actor: str) -> None:
    delays, which = project_delays(), {kind: name}
    if kind == "tag":
        delays.set_policy(
            **which,
            concurrency=values["concurrency"],
            key_concurrency=values["key_concurrency"],
            rate=values["rate_limit"],
            actor=actor,
        )
    is_paused = any(policy.is_paused for policy in delays.policies(**which))
    if values["is_paused"] != is_paused:
        (delays.pause if values["is_paused"] else delays.resume)(**which, actor=actor)
