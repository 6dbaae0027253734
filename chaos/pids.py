"""Who is whose child."""

from __future__ import annotations

from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Those that live; its parent may not have heard yet that one is dead."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in children if _state(child) not in ("Z", "X")]


def _state(pid: int) -> str:
    """As proc(5) has it; a process that is gone is X, dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
