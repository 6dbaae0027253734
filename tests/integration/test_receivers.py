"""Test receivers of callbacks in Flask and Django: they reject missing and invalid signatures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from delaytasks.core.clock import wall_ms
from delaytasks.webhooks.signatures import SigningKeys

pytest.importorskip("flask_sqlalchemy")
pytest.importorskip("django")

OLD, NEW, OTHER = (
    "whsec_" + base64.b64encode(letter * 32).decode() for letter in (b"o", b"n", b"x")
)
#: Posts a payload and headers; returns the status, and the arguments that the view received.
Post = Callable[[bytes, dict[str, str]], tuple[int, Any]]


@pytest.fixture
def flask_post() -> Post:
    from flask import Flask, jsonify, request

    from delaytasks.contrib.flask import verified

    app = Flask("receiver")

    @app.post("/paid")
    def paid() -> Any:
        callback = verified(request, [OLD, NEW])
        return jsonify({"id": callback.id, "body": callback.body})

    def post(payload: bytes, headers: dict[str, str]) -> tuple[int, Any]:
        answer = app.test_client().post(
            "/paid", data=payload, headers=headers, content_type="application/json"
        )
        return answer.status_code, answer.get_json(silent=True)

    return post


@pytest.fixture
def django_post() -> Iterator[Post]:
    from tests.integration import django_settings

    with django_settings.configured():
        from django.http import JsonResponse
        from django.test import Client, override_settings
        from django.urls import path

        from delaytasks.contrib.django.mounting import verified

        @verified([OLD, NEW])
        def paid(request: Any, callback: Any) -> Any:
            return JsonResponse({"id": callback.id, "body": callback.body})

        urls = type("Urls", (), {"urlpatterns": [path("paid", paid)]})

        def post(payload: bytes, headers: dict[str, str]) -> tuple[int, Any]:
            # The client checks CSRF tokens, like Django does for browsers.
            client = Client(enforce_csrf_checks=True, headers=headers)
            answer = client.post("/paid", payload, "application/json")
            return answer.status_code, answer.json() if answer.status_code == 200 else None

        with override_settings(ROOT_URLCONF=urls, ALLOWED_HOSTS=["testserver"]):
            yield post


@pytest.fixture(params=["flask", "django"])
def post(request: pytest.FixtureRequest) -> Post:
    made: Post = request.getfixturevalue(f"{request.param}_post")
    return made


PAYLOAD = '{"order": 7, "name": "é"}'.encode()


def signed(secret: str, payload: bytes = PAYLOAD, age_s: int = 0) -> dict[str, str]:
    timestamp = str(wall_ms() // 1000 - age_s)
    signature = SigningKeys(secret).sign("42", timestamp, payload)
    return {"webhook-id": "42", "webhook-timestamp": timestamp, "webhook-signature": signature}


@pytest.mark.parametrize("secret", [OLD, NEW], ids=["old", "new"])
def test_a_view_receives_a_callback_that_is_signed_with_one_of_its_secrets(
    post: Post, secret: str
) -> None:
    assert post(PAYLOAD, signed(secret)) == (200, {"id": "42", "body": {"order": 7, "name": "é"}})


def test_a_missing_bad_or_stale_signature_is_answered_with_401(post: Post) -> None:
    right = signed(NEW)
    cases = {
        "missing": {},
        "half": {name: value for name, value in right.items() if name != "webhook-signature"},
        "another secret": signed(OTHER),
        "another id": {**right, "webhook-id": "43"},
        "another body": signed(NEW, b"{}"),
        "stale": signed(NEW, age_s=301),
        "from the future": signed(NEW, age_s=-1000),
    }
    for name, headers in cases.items():
        assert post(PAYLOAD, headers) == (401, None), name


def test_a_signed_body_that_is_not_json_is_answered_with_400(post: Post) -> None:
    assert post(b"{nope", signed(NEW, b"{nope")) == (400, None)


def test_a_get_is_no_callback() -> None:
    from django.test import RequestFactory

    from delaytasks.contrib.django.mounting import verified
    from tests.integration import django_settings

    with django_settings.configured():
        view = verified(NEW)(lambda request, callback: None)
        assert view(RequestFactory().get("/paid")).status_code == 405
