"""`./dev audit` fails if the advisory database is unavailable or gives an unexpected answer."""

from __future__ import annotations

import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.proxy import WebServer, answer
from tests.running import ROOT

SCRIPT = ROOT / ".ci" / "audit.py"


def audit(url: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), url], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


def test_an_unavailable_advisory_database_fails_the_audit() -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        code, said = audit(f"http://127.0.0.1:{nobody.getsockname()[1]}/")
    assert (code, "NOT CHECKED" in said) == (3, True)


@pytest.mark.parametrize(
    "reply",
    [answer(404), answer(200, b"hello"), answer(200, b"[]"), answer(200, b"{}")],
    ids=["404", "text", "[]", "{}"],
)
def test_a_server_without_the_known_vulnerability_is_no_advisory_database(
    web: WebServer, reply: Any
) -> None:
    web.answers["/"] = reply
    assert audit(web.url())[0] == 3


@pytest.mark.parametrize(("found", "code"), [(0, 0), (1, 1), (5, 1)])
def test_if_the_advisory_database_answers_the_result_of_pip_audit_counts(
    web: WebServer, monkeypatch: pytest.MonkeyPatch, found: int, code: int
) -> None:
    web.answers["/"] = answer(200, b'{"vulns": [{"id": "x"}]}')
    asked: list[list[str]] = []
    main: Callable[[str], int] = runpy.run_path(str(SCRIPT))["main"]
    monkeypatch.setattr(subprocess, "call", lambda command: asked.append(command) or found)
    installed: list[list[str]] = []
    monkeypatch.setattr(subprocess, "check_call", installed.append)
    assert main(web.url()) == code
    assert (installed[0][1:4], asked[0][1:3]) == (["-m", "pip", "install"], ["-m", "pip_audit"])
