"""Tenants on several databases: the tasks of a tenant are in one of them.

The variable TENANTS_DATABASES lists the databases. Web processes use all of them by `shards`. A
worker serves the one database whose number is in DELAYTASKS_SHARD.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress

from celery import Celery

from delaytasks import DelayedTask, DelayTasks, Shards, TaskNotFoundError

logger = logging.getLogger(__name__)
TAG = "invoice.remind"


def remind(body: dict[str, str]) -> None:
    logger.info("%s is reminded of an invoice", body["tenant"])


def connect(databases: Sequence[str]) -> tuple[Shards, list[Celery]]:
    """Return the databases as one object, and the Celery app of each."""
    apps = [Celery(f"tenants-{number}") for number in range(len(databases))]
    members = []
    for number, (app, url) in enumerate(zip(apps, databases, strict=True)):
        app.conf.imports = ["examples.tenants.app"]
        members.append(DelayTasks(app, url, shard=number, namespace=f"tenants-{number}"))
    shards = Shards(members)
    shards.processor(TAG, retries="1m 10m")(remind)
    return shards, apps


shards, apps = connect(os.environ["TENANTS_DATABASES"].split())
#: The Celery app of a worker's database, for `celery -A examples.tenants.app worker`.
app = apps[int(os.environ.get("DELAYTASKS_SHARD", "0"))]


def remind_later(
    shards: Shards, tenant: str, delay: str, before: Shards | None = None
) -> DelayedTask:
    """Remind a tenant once. A second call moves the reminder.

    While a database is added, the reminder may be where it was `before`.
    """
    if before is not None:
        with suppress(TaskNotFoundError):
            return before.reschedule(tag=TAG, key=tenant, delay=delay)
    return shards.schedule_delay(
        TAG, {"tenant": tenant}, delay, key=tenant, meta={"tenant": tenant}, on_conflict="replace"
    )


def has_paid(shards: Shards, tenant: str) -> bool:
    """Cancel the reminder, and return whether the payment was in time."""
    return bool(shards.cancel(tag=TAG, key=tenant))


def count_done() -> int:
    """Return the number of reminders that were sent, in all databases."""
    pages = shards.each(lambda member: member.find(tag=TAG, status="DONE"))
    return sum(len(page) for page in pages.values())
