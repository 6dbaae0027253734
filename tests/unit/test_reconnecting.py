"""How often a worker looks for its broker, and for how long."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from itertools import pairwise

import pytest
from kombu.exceptions import OperationalError
from kombu.utils import functional

from delaytasks.worker.reconnecting import LONGEST_PAUSE_S, SoonReconnected


class Clock:
    """Stands still but for sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(functional, "sleep", clock.sleep)
    monkeypatch.setattr(functional, "time", clock.time)
    return clock


@pytest.fixture
def nobody() -> Iterator[SoonReconnected]:
    with socket.socket() as bound:  # but nobody listens
        bound.bind(("127.0.0.1", 0))
        yield SoonReconnected(f"redis://127.0.0.1:{bound.getsockname()[1]}/0")


def test_a_broker_is_looked_for_every_few_seconds_however_long_it_is_away(
    clock: Clock, nobody: SoonReconnected
) -> None:
    tries = []
    with pytest.raises(OperationalError):
        nobody.ensure_connection(lambda error, pause: tries.append(clock.now), 20)
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert len(tries) > 20
    assert max(pauses) == LONGEST_PAUSE_S


@pytest.mark.parametrize("retries", [1, 5, 100])
def test_it_is_given_up_when_celery_would_have(clock: Clock, nobody: SoonReconnected, retries: int) -> None:
    def given_up_at(connection: SoonReconnected, ensure: object) -> float:
        began = clock.now
        with pytest.raises(OperationalError):
            ensure(connection, None, retries)  # type: ignore[operator]
        return clock.now - began

    celerys = given_up_at(nobody, super(SoonReconnected, SoonReconnected).ensure_connection)
    ours = given_up_at(nobody, SoonReconnected.ensure_connection)
    assert celerys <= ours <= celerys + LONGEST_PAUSE_S
