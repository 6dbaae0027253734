"""A task is stored in an available shard while other shards are down."""

from __future__ import annotations

from collections import Counter

import pytest

from delaytasks import NewTask
from delaytasks.core.errors import StoreUnavailableError
from delaytasks.core.events import Events
from delaytasks.sharding import selection as shard_selection
from delaytasks.sharding.selection import ShardSelection

ANY = NewTask("order.close", None, 5)


class ShardSelectionHarness:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at = 1000.0
        monkeypatch.setattr(shard_selection, "monotonic", lambda: self.at)
        self.events = Events()
        self.shard_selection = ShardSelection(3, self.events)
        self.down: set[int] = set()
        self.calls: Counter[int] = Counter()

    def work(self, shard: int) -> int:
        self.calls[shard] += 1
        if shard in self.down:
            raise StoreUnavailableError(f"shard {shard} can not be reached", shard)
        return shard

    def run(self) -> int:
        return self.shard_selection.run(self.shard_selection.of(ANY, None), self.work)

    def first(self, times: int = 60) -> set[int]:
        """Return the shards that are the first choice now."""
        return {self.shard_selection.any()[0] for _ in range(times)}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ShardSelectionHarness:
    return ShardSelectionHarness(monkeypatch)


def test_a_shard_that_is_down_is_skipped_for_a_while_and_then_tried_by_one_call(
    bench: ShardSelectionHarness,
) -> None:
    bench.down = {1}
    assert 1 not in {bench.run() for _ in range(60)}
    assert bench.calls[1] == 1
    assert bench.events.counts["store.down"] == 1
    bench.at += 6
    assert bench.first() == {0, 1, 2}
    assert 1 not in {bench.run() for _ in range(60)}
    assert bench.calls[1] == 2
    bench.down = set()
    bench.at += 6
    assert {bench.run() for _ in range(60)} == {0, 1, 2}
    assert bench.first() == {0, 1, 2}


def test_if_all_shards_are_down_the_error_of_the_last_one_is_raised(
    bench: ShardSelectionHarness,
) -> None:
    bench.down = {0, 1, 2}
    with pytest.raises(StoreUnavailableError, match=r"shard \d can not be reached"):
        bench.run()
    assert bench.calls == {0: 1, 1: 1, 2: 1}
    bench.down = {0, 1}
    assert bench.run() == 2, "though all of them rest"


def test_a_task_whose_shard_is_down_is_not_written_to_another_shard(
    bench: ShardSelectionHarness,
) -> None:
    home = bench.shard_selection.home("order.close", "7")
    bench.down = {home}
    with pytest.raises(StoreUnavailableError, match=f"shard {home} "):
        bench.shard_selection.run(
            bench.shard_selection.of(NewTask("order.close", None, 5, key="7"), None), bench.work
        )
    assert bench.calls == {home: 1}


def test_a_shard_is_skipped_as_long_as_it_does_not_answer(
    bench: ShardSelectionHarness,
) -> None:
    def wait(shard: int) -> int:
        assert bench.first() == {0, 1, 2}
        bench.at += 1.5
        assert bench.first() == {0, 2}
        return shard

    assert bench.shard_selection.run([1], wait) == 1
    assert bench.first() == {0, 1, 2}


def test_a_busy_shard_is_not_down(bench: ShardSelectionHarness) -> None:
    def busy(shard: int) -> int:
        raise StoreUnavailableError("the key changed hands")

    with pytest.raises(StoreUnavailableError):
        bench.shard_selection.run([1], busy)
    assert bench.first() == {0, 1, 2}
    assert bench.events.counts["store.down"] == 0


def test_only_the_shard_that_the_error_names_is_skipped(bench: ShardSelectionHarness) -> None:
    """A key that moves is looked up in two shards."""

    def need_both(shard: int) -> int:
        raise StoreUnavailableError("shard 0 can not be reached", 0)

    with pytest.raises(StoreUnavailableError):
        bench.shard_selection.run([1], need_both)
    assert bench.first() == {1, 2}
