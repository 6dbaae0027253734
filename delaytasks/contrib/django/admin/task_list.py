"""The list of tasks in the admin: filters, search, and pages, each after the last task of the one
before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from django.contrib.admin import SimpleListFilter
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import ChangeList

from delaytasks.contrib.django.admin.task_counts import TaskCount, count_tasks
from delaytasks.contrib.django.instance import DjangoDelays, project_delays
from delaytasks.contrib.django.models import DelayTaskRow
from delaytasks.core.errors import InvalidInputError, InvalidKeyError, TaskNotFoundError
from delaytasks.core.filters import filter_of
from delaytasks.core.ids import check_id
from delaytasks.core.page import Page
from delaytasks.core.states import Status
from delaytasks.core.task import DelayTask
from delaytasks.operations.error_search import error_filter, find_by_error
from delaytasks.runtime import runtime_of

#: The name of the cursor in the address of a page.
CURSOR = "cursor"
WEEK = timedelta(days=7)


def row_of(task: DelayTask) -> DelayTaskRow:
    """Return the row of a task for the admin's pages, which read the attribute `task`."""
    same = "id tag queue priority attempts lapses worker".split()
    same += "expected_time create_time execution_time update_time lease_until".split()
    row = DelayTaskRow(status=int(task.status), **{name: getattr(task, name) for name in same})
    row.task = task
    return row


# -- filters --------------------------------------------------------------------------------------


class ChoiceFilter(SimpleListFilter):
    """A filter whose value `TaskList` reads."""

    def queryset(self, request: Any, queryset: Any) -> Any:
        return queryset


class StatusFilter(ChoiceFilter):
    title = parameter_name = "status"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        return [(status.name, status.name) for status in Status]


class DueFilter(ChoiceFilter):
    title, parameter_name = "due date", "due"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, text) for name, (text, _, _) in DUE_RANGES.items()]


#: The choices of `DueFilter`: their words, and the beginning and the end relative to now.
DUE_RANGES: Mapping[str, tuple[str, timedelta | None, timedelta | None]] = {
    "past": ("Already due", None, timedelta()),
    "past_day": ("Past 24 hours", -timedelta(days=1), timedelta()),
    "past_week": ("Past 7 days", -WEEK, timedelta()),
    "hour": ("Next hour", timedelta(), timedelta(hours=1)),
    "day": ("Next 24 hours", timedelta(), timedelta(days=1)),
    "week": ("Next 7 days", timedelta(), WEEK),
    "later": ("Later than 7 days", WEEK, None),
}


class TextFilter(ChoiceFilter):
    """A field with proposals, since there may be tags that this process does not know."""

    template = "admin/delaytasks/text_filter.html"

    def has_output(self) -> bool:
        return True

    def choices(self, changelist: Any) -> Iterator[dict[str, Any]]:
        others = changelist.filter_params.items()
        yield {
            "others": [(n, v) for n, values in others if n != self.parameter_name for v in values],
            "all": changelist.get_query_string(remove=[self.parameter_name]),
        }


class TagFilter(TextFilter):
    title = parameter_name = "tag"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        tags = (spec.tag for spec in runtime_of(project_delays()).registry)
        return [(tag, tag) for tag in sorted(tags) if not tag.startswith("delaytasks.")]


class QueueFilter(TextFilter):
    title = parameter_name = "queue"

    def lookups(self, request: Any, model_admin: Any) -> list[tuple[str, str]]:
        delays = project_delays()
        queues = {delays.settings.default_queue, *runtime_of(delays).registry.queues()}
        return [(queue, queue) for queue in sorted(queues)]


# -- search ---------------------------------------------------------------------------------------


class TaskSearch:
    """The tasks that match the filters of the page and the text in its search field.

    The text is an id or a key. If no task has that id or key, it is a part of the error text.
    """

    def __init__(
        self, delays: DjangoDelays, filters: Mapping[str, Any], text: str, is_newest_first: bool
    ) -> None:
        self._delays = delays
        self._given = filters
        self._text = text
        self._is_newest_first = is_newest_first

    def page(self, cursor: str | None, limit: int) -> Page:
        if "error" in self.filters:
            find, first = self._delays.find, self._is_newest_first
            return find_by_error(find, self._given, self._text, cursor, first, limit)[0]
        page = self._delays.find(
            **self.filters, cursor=cursor, limit=limit, newest_first=self._is_newest_first
        )
        named = self._named_by_id
        if named is None or cursor is not None:
            return page
        return Page([named, *(task for task in page if task.id != named.id)], page.cursor)

    @cached_property
    def filters(self) -> dict[str, Any]:
        """The filters of `find` and of the bulk functions."""
        given = dict(self._given)
        if not self._text:
            return given
        try:
            has_key = len(self._delays.find(**given, key=self._text, limit=1)) > 0
        except InvalidKeyError:
            has_key = False
        if has_key or self._named_by_id is not None:
            return {**given, "key": self._text}
        return {"status": [Status.FAILED], **given, "error": error_filter(self._text)}

    @cached_property
    def _named_by_id(self) -> DelayTask | None:
        try:
            return self._delays.get(check_id(self._text)) if self._text.isdigit() else None
        except (InvalidInputError, TaskNotFoundError):
            return None

    def count(self, reads_rows: bool = True) -> TaskCount:
        return count_tasks(self._delays, filter_of(self.filters), reads_rows)


class TaskList(ChangeList):
    """The page of tasks. `next_page` is the query string of the next one."""

    next_page: str | None
    shown_count: TaskCount

    def get_queryset(self, request: Any, exclude_parameters: Any = None) -> Any:
        """Read the filters. The returned queryset is not evaluated."""
        for parameters in (self.params, self.filter_params):
            parameters.pop(CURSOR, None)
        queryset = super().get_queryset(request, exclude_parameters)
        directions = self.get_ordering_field_columns().values()
        delays = project_delays()
        values = {spec.parameter_name: spec.value() for spec in self.filter_specs}
        filters = {name: values[name] for name in ("tag", "queue", "status") if values[name]}
        filters |= due_between(values["due"], runtime_of(delays).clock.now())
        self.search = TaskSearch(delays, filters, self.query.strip(), "asc" not in directions)
        return queryset

    def get_results(self, request: Any) -> None:
        cursor = request.GET.get(CURSOR) or None
        try:
            page = self.search.page(cursor, self.list_per_page)
            is_whole = cursor is None and page.cursor is None
            found = TaskCount(len(page)) if is_whole else self.search.count(reads_rows=False)
        except InvalidInputError as error:
            raise IncorrectLookupParameters(str(error)) from error
        self.result_list = [row_of(task) for task in page]
        self.shown_count, self.result_count = found, found.tasks
        self.next_page = page.cursor and self.get_query_string({CURSOR: page.cursor})
        self.full_result_count, self.show_full_result_count = None, False
        self.show_admin_actions = bool(self.result_list)
        self.can_show_all, self.multi_page, self.paginator = False, not is_whole, None


def due_between(name: str | None, now: datetime) -> dict[str, datetime]:
    """Return the filters `since` and `until` of a choice of `DueFilter`."""
    _, since, until = DUE_RANGES.get(name or "", ("", None, None))
    bounds = {"since": since, "until": until}
    return {bound: now + shift for bound, shift in bounds.items() if shift is not None}
