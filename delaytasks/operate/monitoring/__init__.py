"""The Grafana dashboard and the alert rules, which belong to the metrics of this version."""

from __future__ import annotations

from importlib.resources import files

#: The files by the names that the command line gives them.
NAMES = {"dashboard": "dashboard.json", "rules": "rules.yml"}


def read_file(name: str) -> str:
    """Return the text of the file that `NAMES` lists as `name`."""
    return (files(__name__) / NAMES[name]).read_text()
