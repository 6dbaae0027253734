"""Several shards share one timer, whose messages contain the shard."""

from __future__ import annotations

from typing import Any

import pytest

from delaytasks.core.clock import Clock
from delaytasks.core.ids import COUNTER_BITS
from delaytasks.core.interfaces import Entry
from delaytasks.timers.eta import EtaTimer, TimerMessage, read_message
from delaytasks.timers.shard_timer import ShardTimer
from tests.recording import RecordingTimer


def test_a_sweep_arms_only_entries_whose_id_names_its_shard() -> None:
    timer = RecordingTimer()
    ours, other, small = (
        Entry(1 << 60 | 2 << COUNTER_BITS, 0, 5),
        Entry(1 << 60, 0, 5),
        Entry(7, 0, 5),
    )
    assert ShardTimer(timer, 2).arm([ours, other, small])
    assert timer.armed == [ours]
    assert ShardTimer(timer, 0).arm([other, small])
    assert timer.armed == [ours, other, small], "small ids are taken for the first shard's"


def test_a_drain_token_names_its_shard() -> None:
    sent: list[Any] = []

    class Publisher:
        is_up = True

        def send(self, name: str, queue: str, messages: list[Any]) -> bool:
            sent.extend(args for args, _ in messages)
            return True

    publisher: Any = Publisher()
    for shard in (0, 3):
        assert ShardTimer(EtaTimer(publisher, Clock()), shard).request_drain("q", [1, 2], 1, 5)
    assert [read_message(args, "q") for args in sent] == [
        TimerMessage([], [1, 2], 0),
        TimerMessage([], [1, 2], 3),
    ]
    assert sent[0] == [[], {"drain": [1, 2]}], "as it was before there were shards"
    sent.clear()
    assert not EtaTimer(publisher, Clock()).request_drain("another program's", [1], 1, 5)
    assert not sent, "no broker need know such a queue"


@pytest.mark.parametrize("shard", [-1, 32, "1", None, True, 1.0])
def test_a_drain_token_with_an_invalid_shard_is_refused(shard: object) -> None:
    with pytest.raises(ValueError, match="shard"):
        read_message([[], {"drain": [0], "shard": shard}], "q")
