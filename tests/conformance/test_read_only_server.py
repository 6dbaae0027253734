"""A PostgreSQL server that answers but refuses writes is logged one time, not once for each
stage."""

from __future__ import annotations

import logging

import pytest
from sqlalchemy import make_url

from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.storage.store import Store
from tests.conftest import open_store, settings_for


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG]
    return [line for line in found if line.startswith("loop.failed")]


@pytest.mark.slow
def test_a_read_only_database_is_logged_once_for_all_stages(
    postgresql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner, events = open_store(postgresql_url, table_prefix="ro_"), Events()
    url = make_url(postgresql_url).update_query_dict(
        {"options": "-c default_transaction_read_only=on"}
    )
    text = url.render_as_string(hide_password=False)
    store = Store(text, settings_for(text, table_prefix="ro_"))
    stages = {
        "seen": lambda: store.workers.report("w", ["default"], "solo", 1, 0),
        "expire": lambda: store.workers.expire(60),
        "sweep partition 0": lambda: store.sweeps.begin_sweep(0, 1, 4),
        "read": store.workers.all,
    }
    caplog.set_level(logging.DEBUG, "delaytasks")
    for _ in range(3):
        for stage, work in stages.items():
            events.attempt("sweep", stage, work)
    assert len(lines(caplog)) == 1
    assert events.counts["loop.failed"] >= 6  # subscribers receive each failure
    for stage in stages:  # the server accepts writes again
        assert events.attempt("sweep", stage, lambda: None)
    events.attempt("sweep", "seen", stages["seen"])
    assert len(lines(caplog)) == 2
    store.close()
    with owner.database.begin() as connection:
        owner.schema.metadata.drop_all(connection)
    owner.close()


def test_another_reason_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    events = Events()

    def fail(reason: str) -> None:
        raise StoreUnavailableError(reason, is_unable=True)

    for reason in ("read-only", "read-only", "disk is full", "disk is full"):
        events.attempt("sweep", "seen", lambda reason=reason: fail(reason))  # type: ignore[misc]
    assert len(lines(caplog)) == 2
