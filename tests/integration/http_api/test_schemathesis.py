"""Generated requests, valid and invalid ones, get only the responses that the document allows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings

from delaytasks.http_api.routes import ROUTES
from tests.integration.http_api.conftest import ApiSite, site_on_a_file

schemathesis: Any = pytest.importorskip("schemathesis")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def generated_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiSite]:
    with site_on_a_file(tmp_path_factory.mktemp("schemathesis")) as site:
        yield site


@pytest.fixture(scope="module")
def key(generated_site: ApiSite) -> str:
    scopes = ["read", "operate", "schedule:*", "schedule:delaytasks.callback"]
    return generated_site.keys.create("generated", scopes)[0]


def array_parameters(document: Any) -> set[str]:
    """Return the names of the parameters of queries that may be given several times."""
    operations = [each for path in document["paths"].values() for each in path.values()]
    return {
        parameter["name"]
        for operation in operations
        for parameter in operation.get("parameters", ())
        if parameter["in"] == "query" and parameter["schema"].get("type") == "array"
    }


def is_in_the_url(query: dict[str, Any], lists: set[str]) -> bool:
    """Return whether a URL shows what is wrong with a query. It has nothing of an empty value, and
    the only value of a list looks like the list.
    """
    return all(
        value not in (None, [], {}) and (name not in lists or isinstance(value, list))
        for name, value in query.items()
    )


def test_generated_requests_get_documented_responses(generated_site: ApiSite, key: str) -> None:
    # The document does not express all rules, such as the largest delay or the syntax of a delay.
    rules = [schemathesis.checks.positive_data_acceptance]
    headers = {"Authorization": f"Bearer {key}"}
    document = schemathesis.openapi.from_wsgi("/v1/openapi.json", generated_site.app)
    operations = [found.ok() for found in document.get_all_operations()]
    assert len(operations) == len(ROUTES)
    lists = array_parameters(document.raw_schema)
    assert "status" in lists
    # Without schemathesis's own pytest plugin, which fails with pytest 9.2.
    for operation in operations:
        for mode in schemathesis.GenerationMode:

            @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                assume(is_in_the_url(case.query or {}, lists))
                case.call_and_validate(headers=headers, excluded_checks=rules)

            check()
