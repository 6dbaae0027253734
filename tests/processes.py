"""Find the processes that a test started directly or indirectly."""

from __future__ import annotations

from pathlib import Path


def marked(*marks: str) -> dict[int, str]:
    """Return the command line of each process whose command line or environment contains a mark."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
            searched = line + b"\0" + (folder / "environ").read_bytes()
        except OSError:
            continue  # it has ended, or belongs to another user
        if line and any(mark.encode() in searched for mark in marks):
            found[int(folder.name)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found
