"""A practice that reminds its patients of appointments, with coroutines only."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Annotated, Any

from celery import Celery
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import AwareDatetime, BaseModel, Field
from sqlalchemy import DateTime, String
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from delaytasks import DelayTasks, InvalidInputError
from delaytasks.contrib.asgi import delays_lifespan, request_transaction

logger = logging.getLogger(__name__)
DATABASE_URL = os.environ["DELAYTASKS_DATABASE_URL"]
#: How long before an appointment the patient is reminded. A real practice would take a day.
BEFORE = timedelta(seconds=2)

app = Celery("practice", broker=os.environ["CELERY_BROKER_URL"])
app.conf.imports = ["examples.fastapi_reminders.app"]
delays = DelayTasks(app, DATABASE_URL)
engine = create_async_engine(DATABASE_URL.replace("sqlite:", "sqlite+aiosqlite:"))
sessions = async_sessionmaker(engine)
Transaction = Annotated[AsyncSession, request_transaction(sessions)]


class Base(DeclarativeBase): ...


class Appointment(Base):
    __tablename__ = "appointments"

    patient: Mapped[str] = mapped_column(String(100), primary_key=True)
    starts_at: Mapped[Any] = mapped_column(DateTime(timezone=True))


class Booking(BaseModel):
    patient: str = Field(min_length=1, max_length=100)
    starts_at: AwareDatetime


class Move(BaseModel):
    starts_at: AwareDatetime


@asynccontextmanager
async def tables(_: FastAPI) -> AsyncIterator[None]:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


web = FastAPI(lifespan=delays_lifespan(delays, tables))


@web.exception_handler(InvalidInputError)
async def refuse(_: Request, error: InvalidInputError) -> JSONResponse:
    """Refuse a name that cannot be the key of a task, such as a blank one."""
    return JSONResponse({"detail": str(error)}, 422)


@delays.processor("appointment.remind", retries="10s 1m 10m")
async def remind(body: dict[str, str]) -> None:
    async with sessions() as session:
        appointment = await session.get(Appointment, body["patient"])
    if appointment is not None:
        logger.info("%s is reminded", appointment.patient)


async def set_reminder(patient: str, starts_at: datetime, session: AsyncSession) -> None:
    """Schedule the reminder, instead of one that waits or in addition to one that has run."""
    await remind.aschedule(
        {"patient": patient},
        at=starts_at - BEFORE,
        key=patient,
        on_conflict="replace",
        session=session,
    )


async def appointment_of(patient: str, session: AsyncSession) -> Appointment:
    appointment = await session.get(Appointment, patient)
    if appointment is None:
        raise HTTPException(404, f"{patient} has no appointment")
    return appointment


@web.post("/appointments", status_code=201)
async def book(booking: Booking, session: Transaction) -> Booking:
    """Store the appointment and its reminder: both or, after an error, neither of them."""
    patient, starts_at = booking.patient, booking.starts_at
    await set_reminder(patient, starts_at, session)
    session.add(Appointment(patient=patient, starts_at=starts_at))
    try:
        await session.flush()
    except IntegrityError as error:
        raise HTTPException(409, f"{patient} has an appointment") from error
    return booking


@web.patch("/appointments/{patient}")
async def move(patient: str, to: Move, session: Transaction) -> Booking:
    appointment = await appointment_of(patient, session)
    appointment.starts_at = to.starts_at
    await set_reminder(patient, to.starts_at, session)
    return Booking(patient=patient, starts_at=to.starts_at)


@web.delete("/appointments/{patient}", status_code=204)
async def call_off(patient: str, session: Transaction) -> None:
    await session.delete(await appointment_of(patient, session))
    await delays.acancel(tag="appointment.remind", key=patient, session=session)
