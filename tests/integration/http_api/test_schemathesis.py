"""Generated requests, valid and invalid ones, get only the responses that the document allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.integration.http_api.conftest import ApiSite, site_at

schemathesis: Any = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def generated_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiSite]:
    folder = tmp_path_factory.mktemp("schemathesis")
    with site_at(f"sqlite:///{folder / 'api.sqlite3'}", folder, requests_per_s=1e9) as site:
        yield site


@pytest.fixture(scope="module")
def key(generated_site: ApiSite) -> str:
    scopes = ["read", "operate", "schedule:*", "schedule:delaytasks.callback"]
    return generated_site.keys.create("generated", scopes)[0]


@pytest.fixture(scope="module")
def document(generated_site: ApiSite) -> Any:
    return schemathesis.openapi.from_wsgi("/v1/openapi.json", generated_site.app)


@schemathesis.pytest.from_fixture("document").parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_generated_requests_get_documented_responses(case: Any, key: str) -> None:
    # The document does not express all rules, such as the largest delay or the syntax of a delay.
    rules = [schemathesis.checks.positive_data_acceptance]
    case.call_and_validate(headers={"Authorization": f"Bearer {key}"}, excluded_checks=rules)
