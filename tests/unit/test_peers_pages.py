"""The page and the pictures of `./dev bench --peers` are made from the results of such a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers import pages
from benchmarks.peers.results import Results
from benchmarks.processes import ROOT


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


def test_the_page_in_the_docs_matches_its_values(tmp_path: Path) -> None:
    written: list[Any] = pages.write(
        ROOT / "docs" / "peers.json", tmp_path / "peers.md", tmp_path / "images"
    )
    for path in written:
        shown = (pages.PAGE if path.suffix == ".md" else pages.PICTURES / path.name).read_text()
        assert shown == path.read_text(), (
            f"{path.name} is out of date; run: ./dev bench --pages docs/peers.json"
        )
