"""`./dev bench work --document`: the rounds that fit, and the tables."""

from __future__ import annotations

import pytest

from benchmarks.peers.documents import markdown, rounds_within


class TurnedClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("row_s", "expected"),
    [
        (100, [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]),
        (200, [("a", 0), ("b", 0)]),
        (500, [("a", 0), ("b", 0)]),
        (700, [("a", 0)]),
    ],
)
def test_rounds_are_measured_as_long_as_they_fit(
    row_s: float, expected: list[tuple[str, int]]
) -> None:
    watch = TurnedClock()
    seen = []
    for turn in rounds_within(["a", "b"], 650, watch):
        seen.append(turn)
        watch.now += row_s
    assert seen == expected


def test_each_load_has_a_table_with_a_line_for_each_condition() -> None:
    values = {
        ("burst, sleep 5 ms", "drained/s"): {"ours": {0: 200.0, 1: 300.0}, "bare": {0: 100.0}},
        ("burst, sleep 5 ms", "CPU of the servers, ms per task"): {"ours": {0: 1.0}},
        ("burst, 0 ms", "drained/s"): {"ours": {0: 5000.0}},
        ("steady, 0 ms", "lateness p50, ms"): {"bare": {0: 1.5}, "ours": {0: 3.0}},
    }
    shown = markdown("work", {"cores": "2"}, {"x": [0.5]}, values, "ours", "bare")
    assert shown.splitlines()[0].startswith("`./dev bench work`: cores 2; load of the machine")
    assert shown.splitlines()[2:] == [
        "| burst | drained/s |",
        "|---|---|",
        "| sleep 5 ms | 250 / 100 (2) |",
        "| 0 ms | 5,000 |",
        "",
        "| steady | lateness p50, ms |",
        "|---|---|",
        "| 0 ms | 3 / 1.50 (2) |",
    ]
