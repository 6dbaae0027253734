"""The addresses of the console for probes, which need no login."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delaytasks.console.application import make_console
from delaytasks.console.viewers import HostAccess, UserFile
from delaytasks.operations import health as probes
from tests.ui.console_site import Site


def test_probes_need_no_login_and_get_no_session(site: Site, tmp_path: Path) -> None:
    client = make_console(site.delays, UserFile(tmp_path / "users.json")).test_client()
    for name in ("live", "ready"):
        answer = client.get(f"/health/{name}")
        assert (answer.status_code, json.loads(answer.text)["is_healthy"]) == (200, True)
        assert (answer.mimetype, answer.headers["Cache-Control"]) == (
            "application/json",
            "no-store",
        )
        assert "Set-Cookie" not in answer.headers
        assert client.head(f"/health/{name}").status_code == 200
    assert client.get("/").status_code == 303


def test_a_site_that_mounts_the_console_is_not_asked_who_calls_a_probe(site: Site) -> None:
    def fail(environ: object) -> None:
        raise RuntimeError("the database of the users does not answer")

    client = make_console(site.delays, HostAccess(fail)).test_client()
    assert client.get("/health/ready").status_code == 200
    assert client.get("/").status_code == 500


def test_a_console_without_its_database_lives_and_is_not_ready(
    own_site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "ASK_AGAIN_S", 0.0)
    client = own_site.client(None)
    assert client.get("/health/ready").status_code == 200
    own_site.delays.close()
    (tmp_path / "console.sqlite3").write_text("no database any more")
    answer = client.get("/health/ready")
    assert answer.status_code == 503
    assert json.loads(answer.text) == {"is_healthy": False, "checks": {"database": False}}
    assert client.get("/health/live").status_code == 200, "a restart would not help"
