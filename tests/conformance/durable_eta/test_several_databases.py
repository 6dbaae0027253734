"""Durable Celery tasks whose rows are spread over several databases."""

from __future__ import annotations

from collections.abc import Callable

from celery import Celery

from delaytasks import DelayTasks, Status
from delaytasks.storage import migrations
from delaytasks.wiring import wiring_of


def test_tasks_are_spread_over_the_databases_and_revoked_in_each(
    sqlite_path: Callable[..., str],
) -> None:
    app = Celery("spread", broker="memory://", backend="cache+memory://", set_as_current=False)
    delays = DelayTasks(app, [sqlite_path(f"{n}") for n in range(3)], durable_eta=True)
    for store in wiring_of(delays).router.stores:
        migrations.upgrade(store.database, shard=store.shard)

    @app.task(name="shards.remind")
    def remind(order: int) -> None: ...

    ids = [remind.apply_async((number,), countdown=60).id for number in range(30)]
    for word in ("a", "b"):
        twice = remind.apply_async((word,), countdown=60, task_id="one")
    assert {row.shard for row in delays.find(tag="celery:shards.remind")} == {0, 1, 2}

    app.control.revoke(ids[:20])
    twice.revoke()

    left = {row.key for row in delays.find(tag="celery:shards.remind", status=Status.NOT_COMPLETE)}
    assert left == set(ids[20:])
    delays.close()
