"""For how long a worker has reached its database: only a long contact tells a dead worker from one without network."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from delaytasks.worker import contact as contact_module
from delaytasks.worker.contact import Contact


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(contact_module, "monotonic", lambda: clock.now)
    return clock


def test_a_contact_is_as_long_as_answers_come_without_a_gap(time: SimpleNamespace) -> None:
    contact = Contact(gap_s=8)
    assert contact.seconds == 0, "nobody has answered yet"
    for _ in range(4):
        contact.answered()
        time.now += 5
    assert contact.seconds == 20


def test_a_gap_or_a_failure_begins_the_contact_anew(time: SimpleNamespace) -> None:
    contact = Contact(gap_s=8)
    contact.answered()
    time.now += 5
    contact.failed()
    assert contact.seconds == 0
    contact.answered()
    time.now += 9
    assert contact.seconds == 0, "this process may have stood still"
    contact.answered()
    time.now += 1
    assert contact.seconds == 1
