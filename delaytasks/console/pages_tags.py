"""The tags with what they ran, and the page of one tag. Both read the statistics only."""

from __future__ import annotations

from flask import Flask, render_template, request

from delaytasks.console.requests import requires, state
from delaytasks.console.run_charts import PERIODS, chosen_period, runs_of
from delaytasks.console.shown import viewer_zone
from delaytasks.console.tag_runs import TagList, read_tags
from delaytasks.console.viewers import Role
from delaytasks.core.errors import StoreError
from delaytasks.core.inputs import check_tag
from delaytasks.core.run_counts import OTHER_TAGS

#: The most rows of the page of tags.
SHOWN_TAGS = 100


def install(app: Flask) -> None:
    app.add_url_rule("/tags", view_func=tags)
    # The name is no part of the path, since a tag may contain slashes, or be "..".
    app.add_url_rule("/tag", view_func=tag)


@requires(Role.VIEW)
def tags() -> str:
    period, part = chosen_period(), request.args.get("contains", "").strip()
    found, problem = TagList((), None), None
    try:
        found = read_tags(period)
    except StoreError as error:
        problem = f"The statistics cannot be read: {error}"
    matching = [each for each in found.tags if part.lower() in each.tag.lower()]
    return render_template(
        "tags.html",
        page="tags",
        period=period,
        periods=list(PERIODS),
        step=PERIODS[period].step,
        tags=matching[:SHOWN_TAGS],
        more=len(matching) - SHOWN_TAGS,
        cut_to=found.cut_to,
        contains=part,
        problem=problem,
        other_tags=OTHER_TAGS,
    )


@requires(Role.VIEW)
def tag() -> str:
    name, period = check_tag(request.args.get("name", "")), chosen_period()
    found = state().snapshot()
    policies = [each for each in found.policies if (each.kind, each.name) == ("tag", name)]
    return render_template(
        "tag.html",
        page="tags",
        s=found,
        now=found.now,
        tag=name,
        period=period,
        periods=list(PERIODS),
        runs=runs_of(period, viewer_zone(), name),
        policy=next(iter(policies), None),
        groups=[group for group in found.groups if group.tag == name],
        is_other=name == OTHER_TAGS,
    )
