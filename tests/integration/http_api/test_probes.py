"""The URLs for probes, which need no key."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from delaytasks.operations import health as probes
from delaytasks.operations.health import HealthChecks
from tests.integration.http_api.conftest import ApiSite, site_at


def probe(site: ApiSite, name: str) -> tuple[int, dict[str, bool]]:
    answer = site.app.test_client().get(f"/health/{name}")
    document = json.loads(answer.text)
    assert document["is_healthy"] == all(document["checks"].values())
    return answer.status_code, document["checks"]


def test_a_server_is_ready_on_each_database(site: ApiSite) -> None:
    assert probe(site, "ready") == (200, {"database": True, "tables": True})


def test_a_server_is_not_ready_without_tables(database_url: str, tmp_path: Path) -> None:
    with site_at(database_url, tmp_path, table_prefix="none_") as site:
        assert probe(site, "ready") == (503, {"database": True, "tables": False})


def test_a_server_is_ready_while_its_database_answers(
    file_site: ApiSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "ASK_AGAIN_S", 0.0)
    assert probe(file_site, "ready") == (200, {"database": True, "tables": True})
    file_site.delays.close()
    file = tmp_path / "api.sqlite3"
    content = file.read_bytes()
    file.write_text("no database any more")
    assert probe(file_site, "ready") == (503, {"database": False})
    assert probe(file_site, "live") == (200, {}), "a restart would not help"
    file.write_bytes(content)
    assert probe(file_site, "ready")[0] == 200


def test_a_probe_does_not_wait_for_another_probe_that_waits_for_the_database(
    file_site: ApiSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe(file_site, "ready")[0] == 200
    is_asking, may_answer = threading.Event(), threading.Event()

    def hang(*_: object) -> list[object]:
        is_asking.set()
        may_answer.wait(10)
        return []

    monkeypatch.setattr(probes, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(HealthChecks, "ready", hang)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(probe, file_site, "ready")
        try:
            assert is_asking.wait(5)
            assert probe(file_site, "ready") == (200, {"database": True, "tables": True})
            assert not waiting.done()
        finally:
            may_answer.set()


def test_many_probes_share_one_check_of_the_database(
    file_site: ApiSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "ASK_AGAIN_S", 60.0)
    assert probe(file_site, "ready")[0] == 200
    file_site.delays.close()
    monkeypatch.setattr(HealthChecks, "ready", None)
    assert probe(file_site, "ready")[0] == 200
