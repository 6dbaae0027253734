"""Coroutines use recurring schedules, alone and in their sessions."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from delaytasks import DelayTasks
from delaytasks.core.errors import RecurringNotFoundError
from tests.event_loops import engine_at, own_threads, run
from tests.recording import RecordingTimer


def test_each_method_has_the_effect_of_its_twin(delays: DelayTasks, timer: RecordingTimer) -> None:
    recurring = delays.recurring
    declare = recurring(every="1h", name="declared")
    declare(delays.processor("report")(lambda body: None))

    async def go() -> None:
        made = await recurring.aset("a", "report", {"n": 1}, every="1h", actor="ann")
        assert (made.name, made.body, made.updated_by) == ("a", {"n": 1}, "ann")
        assert (await recurring.apause("a")).is_paused
        assert not (await recurring.aresume("a")).is_paused
        assert (await recurring.arun("a")).body == {"n": 1}
        await recurring.afollow_code()
        assert [each.name for each in await recurring.alist()] == ["a", "declared"]
        assert len(await recurring.anext("a", 2)) == 2
        assert (await recurring.aremove("a")).name == "a"
        with pytest.raises(RecurringNotFoundError):
            await recurring.aget("a")

    seen = own_threads(delays)
    run(go())
    assert seen, "the calls have run in threads"


def test_a_schedule_becomes_part_of_the_transaction_of_an_async_session(
    delays: DelayTasks, timer: RecordingTimer, database_url: str
) -> None:
    recurring = delays.recurring

    async def set_in(session: Any) -> None:
        await recurring.aset("a", "report", every="1h", session=session)
        assert await recurring.alist() == []

    async def go() -> None:
        async with engine_at(database_url) as engine, AsyncSession(engine) as session:
            await set_in(session)
            await session.rollback()
            assert await recurring.alist() == []
            await set_in(session)
            await session.commit()
            assert (await recurring.aget("a")).timing == "every 3600"
            await recurring.apause("a", session=session)
            await recurring.arun("a", session=session)
            await session.commit()
            assert (await recurring.aget("a")).is_paused
            assert len(await delays.afind(tag="report")) == 1

    run(go())
