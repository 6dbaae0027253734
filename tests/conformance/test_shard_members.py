"""`Shards`: several databases as one, on SQLite files."""

from __future__ import annotations

from pathlib import Path

from celery import Celery
from sqlalchemy import create_engine

from delaytasks import DelayTasks, Status
from delaytasks.core.ids import shard_of
from delaytasks.testing import DelaysTester

TAG = "order.close"


def member(folder: Path, number: int) -> DelayTasks:
    """Return one of several `DelayTasks`, with a database of its own."""
    url = f"sqlite:///{folder}/{number}.sqlite3"
    app = Celery(f"shop-{number}", broker="memory://")
    made = DelayTasks(app, url, shard=number, namespace=f"shop-{number}", strict_tags=False)
    made.processor(TAG, keep_result=True)(lambda body: body)
    engine = create_engine(url)
    with engine.begin() as connection:
        made.create_tables(connection)
    engine.dispose()
    return made


def test_new_ids_carry_the_number_of_the_setting_and_their_tasks_run(tmp_path: Path) -> None:
    delays = member(tmp_path, 31)
    with DelaysTester(delays) as tester:
        task = delays.schedule_delay(TAG, 7, 0, key="7")
        assert shard_of(task.id) == shard_of(delays.new_id()) == 31
        tester.run_due()
        assert delays.get(task.id).status is Status.DONE
