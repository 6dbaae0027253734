"""One thread looks for commits that wait for a standby."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine
from sqlalchemy.engine import Engine

from delaytasks.storage import standby_watch as standbys
from delaytasks.storage.standby_watch import StandbyWatch
from tests.waiting import wait_until


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = create_engine("sqlite://")
    yield made
    made.dispose()


def test_a_connection_is_handed_out_when_no_thread_can_be_started(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From Python 3.12 on, no thread starts in a handler of atexit."""
    watch = StandbyWatch("postgresql", lambda: engine)
    watch.observe(engine)
    with monkeypatch.context() as patch:

        def refuse(self: threading.Thread) -> None:
            raise RuntimeError("can't create new thread at interpreter shutdown")

        patch.setattr(threading.Thread, "start", refuse)
        with engine.connect():
            assert watch._thread is None
    with engine.connect():
        assert watch._thread is not None, "later it can"


def test_another_thread_watches_after_one_that_an_error_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standbys, "CHECK_S", 0.01)
    errors: list[object] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    watch = StandbyWatch("postgresql", lambda: engine)
    broken = ValueError("not an error of SQLAlchemy's")

    def fail(*_: object) -> None:
        raise broken

    monkeypatch.setattr(watch, "_check", fail)
    watch.observe(engine)
    with engine.connect():
        wait_until(lambda: errors == [broken], 10, "the end of the thread")
        wait_until(lambda: watch._thread is None, 10, "its name to be free")
    monkeypatch.setattr(watch, "_check", lambda *_: {})
    with engine.connect():
        assert watch._thread is not None
