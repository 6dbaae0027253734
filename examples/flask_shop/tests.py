"""Tests of the shop in a transaction that each test rolls back: `pytest tests.py`."""

from collections.abc import Iterator
from typing import Any

import pytest
from flask import Flask
from shop import create_app
from shop.extensions import db, delays
from shop.orders import Order
from sqlalchemy import Connection, event

from delaytasks.testing import DelaysTester, create_tables


@pytest.fixture(scope="session")
def app() -> Iterator[Flask]:
    """The app with its tables."""
    app = create_app()
    with app.app_context():
        if db.engine.dialect.name == "sqlite":
            let_sqlalchemy_begin(db.engine)
        db.create_all()
        with db.engine.begin() as connection:
            create_tables(connection, delays)
    yield app
    with app.app_context():
        db.drop_all()
        db.engine.dispose()


@pytest.fixture
def delays_bind(app: Flask) -> Iterator[Connection]:
    """A connection in a transaction, which all sessions of the shop join."""
    with app.app_context():
        engines = db.engines
    # No context is open during the test: each request then has a session of its own.
    engine = engines[None]
    with engine.connect() as connection:
        connection.begin()
        engines[None] = connection  # type: ignore[assignment]
        yield connection
        engines[None] = engine
        connection.rollback()


def let_sqlalchemy_begin(engine: Any) -> None:
    """Let SQLAlchemy begin transactions on SQLite, since the driver does so too late."""
    event.listen(engine, "connect", lambda link, _: setattr(link, "isolation_level", None))
    event.listen(engine, "begin", lambda link: link.exec_driver_sql("BEGIN"))


def test_an_order_is_closed_if_it_is_not_paid(app: Flask, delays_tester: DelaysTester) -> None:
    number = app.test_client().post("/orders").json["number"]
    delays_tester.assert_scheduled(
        "order.close", key=str(number), body={"order": number}, within="2s"
    )
    delays_tester.fast_forward("1m")
    with app.app_context():
        order = db.session.get(Order, number)
        assert order is not None
        assert order.status == "closed"


def test_an_order_that_is_paid_is_not_closed(app: Flask, delays_tester: DelaysTester) -> None:
    client = app.test_client()
    number = client.post("/orders").json["number"]
    assert client.post(f"/orders/{number}/pay").json["status"] == "paid"
    delays_tester.assert_not_scheduled("order.close")
    assert delays_tester.fast_forward("1h") == []


def test_what_fails_schedules_nothing(app: Flask, delays_tester: DelaysTester) -> None:
    assert app.test_client().post("/orders/fail").status_code == 500
    delays_tester.assert_not_scheduled("order.close")


def test_each_test_begins_with_empty_tables(app: Flask, delays_tester: DelaysTester) -> None:
    assert delays_tester.scheduled(status=["NOT_COMPLETE", "DONE", "CANCELLED"]) == []
