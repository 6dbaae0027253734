"""The page and the pictures of `./dev bench --peers` are made from the results of such a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.peers import pages
from benchmarks.peers.plots import Bar, bars
from benchmarks.peers.results import Results
from benchmarks.processes import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def results() -> Results:
    found = Results(
        machine={"cores": "2"}, sizes={"burst": "20 tasks", "steady_50": "50 tasks a second"}
    )
    for name, title in (
        ("delaytasks", "delaytasks, `eta`"),
        ("quick", "Quick & Co"),
        ("whole", "Whole seconds"),
    ):
        found.systems[name] = {
            "title": title,
            "version": "1.0",
            "servers": ["Redis"],
            "setup": "as it comes",
            "source": "",
            "limits": [],
        }
    for value in (900.0, 1000.0, 1200.0):
        found.add("burst", "delaytasks", value)
        found.add("burst", "quick", value / 10)
    found.remark("burst", "whole", "failed: it did not start")
    found.remark("burst", "quick", "300 tasks of 2,000, the time was over")
    found.add("steady_50_p99", "whole", 978.0)
    found.add("steady_50_early", "whole", 48.0)
    found.left_out["absent"] = "there is no Node here"
    return found


def test_results_are_unchanged_after_a_round_trip_through_json() -> None:
    found = results()
    assert Results.of_json(json.loads(json.dumps(found.as_json()))) == found


def test_a_value_has_its_spread_and_a_missing_value_has_its_reason() -> None:
    page = pages.text(results(), [])
    burst = page.partition("burst at one instant")[2].partition("\n## ")[0]
    assert "| delaytasks, `eta` | 1,000 (900 to 1,200) |" in burst
    assert "| Quick & Co | 100 (90 to 120)<sup>1</sup> |" in burst
    assert "| Whole seconds | –<sup>2</sup> |" in burst
    assert "1. 300 tasks of 2,000, the time was over\n2. failed: it did not start" in burst
    assert "absent: there is no Node here" in page


def test_measures_without_any_value_have_no_column() -> None:
    page = pages.text(results(), [])
    assert "in bulk" not in page
    assert "When a worker is killed" not in page


def test_the_page_of_a_quick_run_states_that_it_is_no_comparison() -> None:
    found = results()
    found.is_quick = True
    assert "no comparison" in pages.text(found, [])
    assert "no comparison" not in pages.text(results(), [])


def _texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_picture_has_names_units_and_values() -> None:
    svg = bars(
        "Burst", "/s", [Bar("a < b", (250.0,), 200, 300), Bar("none", (), instead="can not")]
    )
    assert _texts(svg) == ["Burst", "/s", "a < b", "250", "none", "can not"]
    assert "-500" in _texts(bars("Lateness", "ms", [Bar("early", (-500.0,))]))
    assert "prefers-color-scheme: dark" in svg


def _widths(svg: str) -> list[float]:
    return [
        float(element.get("width", "0"))
        for element in ElementTree.fromstring(svg).iter(f"{SVG}rect")
        if element.get("class") != "ground"
    ]


def test_bars_are_as_long_as_their_values() -> None:
    one, two = _widths(bars("t", "/s", [Bar("a", (100.0,)), Bar("b", (50.0,))]))
    assert one == pytest.approx(2 * two)
    hundred, ten, one = _widths(
        bars("t", "ms", [Bar(n, (v,)) for n, v in (("a", 100), ("b", 10), ("c", 1))], True)
    )
    assert hundred - ten == pytest.approx(ten - one, abs=0.2)


def test_early_tasks_and_values_outside_of_the_scale_stay_inside_the_picture() -> None:
    for by_tens in (False, True):
        for width in _widths(
            bars(
                "t",
                "ms",
                [Bar("early", (-500.0,)), Bar("none", (0.0,)), Bar("late", (10.0,))],
                by_tens,
            )
        ):
            assert 0 < width <= 760


def test_all_files_are_written_to_the_given_paths(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    file.write_text(json.dumps(results().as_json()))
    written = pages.write(file, tmp_path / "peers.md", tmp_path / "images")
    assert [path.name for path in written] == ["peers.md", "peers-burst.svg", "peers-steady-50.svg"]
    assert "![burst](images/peers-burst.svg)" in (tmp_path / "peers.md").read_text()


def test_the_page_in_the_docs_matches_its_values(tmp_path: Path) -> None:
    written: list[Any] = pages.write(
        ROOT / "docs" / "peers.json", tmp_path / "peers.md", tmp_path / "images"
    )
    for path in written:
        shown = (pages.PAGE if path.suffix == ".md" else pages.PICTURES / path.name).read_text()
        assert shown == path.read_text(), (
            f"{path.name} is out of date; run: ./dev bench --pages docs/peers.json"
        )
