"""Tenants on several databases: `python -m examples.tenants`."""

from __future__ import annotations

import os
import tempfile
from collections import Counter

from delaytasks.model.clock import shard_of
from examples.stage import Stage

TENANTS = [f"tenant-{number}" for number in range(12)]
APP = "examples.tenants.app"


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        Stage(APP, url_variable="TENANTS_DATABASES") as stage,
    ):
        urls = [f"sqlite:///{folder}/{number}.sqlite3" for number in range(3)]
        os.environ["TENANTS_DATABASES"] = " ".join(urls)
        for number in range(3):
            os.environ["DELAYTASKS_SHARD"] = str(number)
            stage.make_tables()
            stage.start_worker(f"worker-{number}")
        from examples.tenants.app import TAG, connect, count_done, has_paid, remind_later, shards

        old, _ = connect(urls[:2])
        made = [remind_later(old, tenant, "1h") for tenant in TENANTS]
        places = Counter(shard_of(task.id) for task in made)
        stage.say(f"12 tenants on two databases: {places[0]} and {places[1]}")

        again = [remind_later(shards, tenant, "2s", before=old) for tenant in TENANTS]
        assert [task.id for task in again] == [task.id for task in made]
        left = sum(shards.member(TAG, tenant) is shards.members[2] for tenant in TENANTS)
        stage.say(f"a third database is added; {left} tenants will move there")
        stage.say(f"tenant-3 has paid: {has_paid(shards, 'tenant-3')}")
        stage.wait_until(lambda: count_done() == 11, "11 reminders")
        stage.say("11 tenants are reminded, each by the worker of its database")

        places = Counter(shard_of(remind_later(shards, name, "1h").id) for name in TENANTS)
        stage.say(f"their next reminders are on three databases: {sorted(places.values())}")
        assert places[2] == left
        cancelled = shards.each(lambda member: member.bulk.cancel(tag=TAG).changed)
        stage.say(f"one call cancels {sum(cancelled.values())} tasks on {len(cancelled)} databases")
        for each in (old, shards):
            each.close()


if __name__ == "__main__":
    main()
