"""Processes with a wrong wall clock, by libfaketime.

Their monotonic clock is unchanged, as on a host whose time was set wrongly.
"""

from __future__ import annotations

from pathlib import Path

#: The paths of Debian's and Fedora's package, then of manual builds.
_PLACES = (
    "/usr/lib/*/faketime",
    "/usr/lib/faketime",
    "/usr/lib64/faketime",
    "/usr/local/lib/faketime",
)
MISSING = "libfaketime is not installed (Debian: apt-get install faketime)"


def library() -> Path | None:
    """Return the path of the library for programs with threads."""
    found = (
        file for place in _PLACES for file in Path("/").glob(f"{place[1:]}/libfaketimeMT.so.1")
    )
    return next(found, None)


def environment(offset_s: int) -> dict[str, str]:
    """Return the environment of a process whose clock is `offset_s` seconds ahead."""
    return {**_environment(), "FAKETIME": f"{offset_s:+d}"}


class Dial:
    """Sets the clock of running processes."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)
        self.environment = {
            **_environment(),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
        }

    def set(self, ahead_s: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead_s:+d}")
        new.replace(self._file)  # a reader finds either the old or the new file


def _environment() -> dict[str, str]:
    file = library()
    if file is None:
        raise RuntimeError(MISSING)
    return {
        "LD_PRELOAD": str(file),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": str(Path(__file__).parent / "wrong_clock"),
    }


def forget_the_dead() -> None:
    """Delete the shared memory of killed processes."""
    for pattern in ("faketime_shm_", "sem.faketime_sem_"):
        for file in Path("/dev/shm").glob(f"{pattern}*"):
            pid = file.name.removeprefix(pattern)
            if pid.isdigit() and not Path("/proc", pid).exists():
                file.unlink(missing_ok=True)
