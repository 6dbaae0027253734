"""Logins of the console at an OpenID provider, whose answers may be hostile."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from delaytasks.cli.main import main
from delaytasks.console.application import make_console
from delaytasks.console.openid import OpenIDAccess
from delaytasks.console.viewers import Role
from delaytasks.core.errors import ConfigError
from tests.ui.console_site import Site, post, served
from tests.ui.openid_provider import CLIENT, CLIENT_SECRET, OpenIDProvider

ROLES = {"support": Role.VIEW, "ops": Role.OPERATE, "leads": Role.ADMIN}


@pytest.fixture
def provider() -> Iterator[OpenIDProvider]:
    made = OpenIDProvider()
    with served(made.app) as address:
        made.issuer = address
        yield made


@pytest.fixture
def client(site: Site, provider: OpenIDProvider) -> FlaskClient:
    access = OpenIDAccess(provider.issuer, CLIENT, CLIENT_SECRET, "groups", ROLES)
    return make_console(site.delays, access).test_client()


def begin(client: FlaskClient, path: str = "/login/openid") -> str:
    """Follow the link of the login page and the redirect of the provider; return the answer."""
    to_provider = client.get(path).location
    answer = httpx.get(to_provider).headers["location"]
    assert answer.startswith("http://localhost/login/openid/answer?")
    return answer.removeprefix("http://localhost")


def log_in(client: FlaskClient) -> Any:
    return client.get(begin(client))


def test_a_viewer_logs_in_at_the_provider_and_returns_to_the_page(
    client: FlaskClient, provider: OpenIDProvider
) -> None:
    assert client.get("/tasks?status=FAILED").location == "/login?next=/tasks?status%3DFAILED"
    page = client.get("/login?next=/tasks?status%3DFAILED").text
    link = re.search(r'href="(/login/openid\?next=[^"]+)"', page)
    assert link is not None
    assert 'name="password"' not in page
    answer = client.get(begin(client, link[1]))
    assert (answer.status_code, answer.location) == (303, "/tasks?status=FAILED")
    text = client.get("/tasks").text
    assert 'ann <span class="chip">operate</span>' in text
    asked = provider.asked
    assert asked["code_challenge_method"] == "S256"
    assert len(asked["state"]) > 20
    assert len(asked["nonce"]) >= 20
    assert post(client, "/logout").location == "/login"
    assert client.get("/tasks").status_code == 303


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "role"),
    [
        (["leads", "support"], "admin"),
        ("support", "view"),
        (["other"], None),
        (None, None),
        ([["ops"], {"ops": 1}, 7], None),
        ("admin", None),
    ],
)
def test_the_claim_names_the_role(
    client: FlaskClient, provider: OpenIDProvider, groups: Any, role: str | None
) -> None:
    provider.user["groups"] = groups
    answer = log_in(client)
    if role is None:
        assert (answer.status_code, "no role" in answer.text) == (403, True)
        assert client.get("/tasks").status_code == 303
    else:
        assert f'<span class="chip">{role}</span>' in client.get("/tasks").text


def refused(client: FlaskClient, path: str) -> None:
    answer = client.get(path)
    assert (answer.status_code, "The login was refused" in answer.text) == (401, True)
    assert client.get("/tasks").status_code == 303


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"iss": "https://evil.example"},
        {"aud": "another-client"},
        {"aud": "another-client", "azp": CLIENT},
        {"aud": [CLIENT, "another-client"], "azp": "another-client"},
        {"nonce": "of another login"},
        {"nonce": None},
        {"exp": 1_000_000_000},
        {"exp": None},
        {"sub": None},
    ],
    ids=str,
)
def test_a_token_with_a_wrong_claim_is_refused(
    client: FlaskClient, provider: OpenIDProvider, changed: dict[str, Any]
) -> None:
    provider.changed_claims = changed
    refused(client, begin(client))


@pytest.mark.slow
@pytest.mark.parametrize(
    "forge", "sign_with_another_key sign_with_the_secret leave_unsigned change_the_signed".split()
)
def test_a_token_with_a_wrong_signature_is_refused(
    client: FlaskClient, provider: OpenIDProvider, forge: str
) -> None:
    provider.forge = getattr(provider, forge)
    refused(client, begin(client))


def test_an_answer_to_another_login_is_refused(
    client: FlaskClient, provider: OpenIDProvider
) -> None:
    attackers = client.application.test_client()
    stolen = begin(attackers)
    refused(client, stolen)  # the victim has begun no login
    own, other = parse_qs(urlsplit(begin(client)).query), parse_qs(urlsplit(stolen).query)
    # The code of the attacker's login does not fit the victim's verifier.
    refused(client, f"/login/openid/answer?state={own['state'][0]}&code={other['code'][0]}")


def test_an_answer_is_used_once(client: FlaskClient) -> None:
    answer = begin(client)
    assert client.get(answer).status_code == 303
    post(client, "/logout")
    refused(client, answer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "query", ["", "code=1", "state=1", "error=access_denied", "error=x&error_description=<b>hi"]
)
def test_a_made_up_answer_is_refused(client: FlaskClient, query: str) -> None:
    begin(client)
    refused(client, f"/login/openid/answer?{query}")
    assert "<b>hi" not in client.get(f"/login/openid/answer?{query}").text


def test_an_answer_without_an_id_token_is_refused(
    client: FlaskClient, provider: OpenIDProvider
) -> None:
    provider.has_id_token = False
    refused(client, begin(client))


@pytest.mark.slow
@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "https://evil.example"},
        {"token_endpoint": "http://evil.example/token"},
        {"id_token_signing_alg_values_supported": ["none", "HS256"]},
    ],
    ids=str,
)
def test_a_provider_that_is_not_the_issuer_or_not_secure_is_not_used(
    client: FlaskClient, provider: OpenIDProvider, metadata: dict[str, Any]
) -> None:
    provider.metadata = metadata
    assert client.get("/login/openid").status_code == 503


def test_a_new_key_of_the_provider_is_read(client: FlaskClient, provider: OpenIDProvider) -> None:
    assert log_in(client).status_code == 303
    post(client, "/logout")
    provider.key, provider.key_id = OpenIDProvider().key, "second"
    assert log_in(client).status_code == 303


def test_the_log_has_one_line_for_a_made_up_answer(
    client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    refused(client, "/login/openid/answer?error=x&error_description=a%0Ainjected%1B[31m")
    [line] = [each for each in caplog.messages if "refused OpenID login" in each]
    assert "injected" in line
    assert line.isprintable()
    assert not any(record.exc_info for record in caplog.records)


def test_the_log_has_no_secrets(
    client: FlaskClient, provider: OpenIDProvider, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    provider.forge = provider.sign_with_another_key
    answer = begin(client)
    refused(client, answer)
    assert "refused OpenID login" in caplog.text
    for secret in (CLIENT_SECRET, parse_qs(urlsplit(answer).query)["code"][0]):
        assert secret not in caplog.text


def test_sessions_of_another_provider_do_not_count(
    site: Site, client: FlaskClient, provider: OpenIDProvider
) -> None:
    log_in(client)
    with client.session_transaction() as session:
        kept = dict(session)
    other = OpenIDAccess("https://other.example", CLIENT, CLIENT_SECRET, "groups", ROLES)
    assert other.viewer({}, kept) is None
    own = OpenIDAccess(provider.issuer, CLIENT, CLIENT_SECRET, "groups", ROLES)
    assert own.viewer({}, kept) is not None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"issuer": "http://login.example"}, "https address"),
        ({"client_secret": ""}, "secret"),
        ({"roles": {}}, "role"),
    ],
)
def test_a_wrong_configuration_is_refused(options: dict[str, Any], problem: str) -> None:
    right = {
        "issuer": "https://login.example",
        "client_id": CLIENT,
        "client_secret": CLIENT_SECRET,
        "claim": "groups",
        "roles": ROLES,
    }
    OpenIDAccess(**right)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=problem):
        OpenIDAccess(**{**right, **options})


def test_the_command_names_what_is_missing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = {
        "DELAYTASKS_DATABASE_URL": f"sqlite:///{tmp_path / 'cli.sqlite3'}",
        "DELAYTASKS_CONSOLE_OPENID_SECRET": CLIENT_SECRET,
    }
    command = ["console", "--openid-issuer", "https://login.example", "--openid-client", CLIENT]
    without_role = CliRunner().invoke(main, command, env=url)
    assert (without_role.exit_code, "role" in without_role.output) == (2, True)
    wrong = CliRunner().invoke(main, [*command, "--openid-role", "ops"], env=url)
    assert (wrong.exit_code, "VALUE=ROLE" in wrong.output) == (2, True)
