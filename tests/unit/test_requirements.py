"""The minimum versions of our dependencies have no known vulnerability."""

from __future__ import annotations

import re

import pytest

from tests.running import ROOT

#: The versions that repaired the last known vulnerability that concerns delaytasks.
REPAIRED = {
    "cryptography": "46.0.5",  # CVE-2026-26007, and CVE-2024-12797 before
    "django": "5.2.11",  # CVE-2026-1207 and others. Django 4.2, 5.0 and 5.1 get no more fixes.
    "flask": "3.1.3",  # CVE-2026-27205
    "jinja2": "3.1.6",  # CVE-2025-27516
    "orjson": "3.11.6",  # CVE-2025-67221
    "pymysql": "1.1.1",  # CVE-2024-36039
    "requests": "2.32.4",  # CVE-2024-47081
    "setuptools": "78.1.1",  # CVE-2025-47273
    "starlette": "0.49.1",  # CVE-2025-62727
    "tornado": "6.5.3",  # CVE-2025-67724 and others
    "urllib3": "2.6.3",  # CVE-2026-21441
    "werkzeug": "3.1.6",  # CVE-2026-27199
}


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize("name", REPAIRED)
def test_no_version_with_a_known_vulnerability_may_be_installed(name: str) -> None:
    found = re.findall(rf'"{name}(?:\[\w+\])?>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    assert found, f"{name} has no minimum version"
    assert all(numbers(version) >= numbers(REPAIRED[name]) for version in found)
