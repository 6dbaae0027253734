"""Tests of the reminders, which need neither a broker nor a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import httpx
import pytest

from delaytasks.testing import DelaysTester, create_tables
from examples.fastapi_reminders.app import BEFORE, Base, delays, engine, web

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def tester() -> AsyncIterator[DelaysTester]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.drop_all)
        await connection.run_sync(Base.metadata.create_all)
        await connection.run_sync(create_tables, delays)
    with DelaysTester(delays) as tester:
        tester.clear()
        yield tester
    await engine.dispose()


@pytest.fixture
async def client(tester: DelaysTester) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=web)
    async with httpx.AsyncClient(transport=transport, base_url="http://practice") as client:
        yield client


async def test_a_patient_is_reminded_before_the_appointment(
    tester: DelaysTester, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    starts_at = tester.now + timedelta(hours=1)
    booking = {"patient": "ada", "starts_at": starts_at.isoformat()}
    assert (await client.post("/appointments", json=booking)).status_code == 201
    await tester.aassert_scheduled("appointment.remind", key="ada", at=starts_at - BEFORE)
    await tester.afast_forward("1h")
    assert "ada is reminded" in caplog.text


async def test_a_reminder_moves_with_its_appointment_and_is_cancelled_with_it(
    tester: DelaysTester, client: httpx.AsyncClient
) -> None:
    starts_at = tester.now + timedelta(hours=1)
    booking = {"patient": "bob", "starts_at": starts_at.isoformat()}
    await client.post("/appointments", json=booking)
    later = starts_at + timedelta(hours=2)
    await client.patch("/appointments/bob", json={"starts_at": later.isoformat()})
    assert await tester.afast_forward("2h") == []
    await tester.aassert_scheduled("appointment.remind", key="bob", at=later - BEFORE)
    assert (await client.delete("/appointments/bob")).status_code == 204
    assert await tester.afast_forward("2h") == []
