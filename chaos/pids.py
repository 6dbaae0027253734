"""Find the child processes of a process, and the state of a process."""

from __future__ import annotations

from pathlib import Path


def children_of(pid: int) -> list[int]:
    """Return the living children. The parent may not have noticed yet that a child is dead."""
    children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return [child for child in children if is_alive(child)]


def is_alive(pid: int) -> bool:
    return _state(pid) not in ("Z", "X")


def _state(pid: int) -> str:
    """Return the process state as in proc(5); X (dead) if the process does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
