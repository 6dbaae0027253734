"""A hook of MkDocs: put each decision record into the navigation.

mkdocs.yml need not list them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Replace the entry `Decisions: decisions` with the pages of that folder: its index first."""
    docs = Path(config["docs_dir"])
    for section in config["nav"]:
        for entry in next(iter(section.values())):
            if isinstance(entry, dict) and "Decisions" in entry:
                pages = sorted(
                    (docs / entry["Decisions"]).glob("*.md"),
                    key=lambda page: (page.name != "README.md", page),
                )
                entry["Decisions"] = [page.relative_to(docs).as_posix() for page in pages]
    return config
