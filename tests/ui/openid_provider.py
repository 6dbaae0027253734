"""A small OpenID provider with real signatures. A test can make it answer as an attacker would.

It uses no library for OpenID, so that a mistake of the console's library is not in both.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import time
from typing import Any
from urllib.parse import urlencode

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from flask import Flask, Response, abort, jsonify, redirect, request

CLIENT, CLIENT_SECRET = "console", "a secret of the console"


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def encoded_json(value: object) -> str:
    return encoded(json.dumps(value).encode())


class OpenIDProvider:
    """Logs in one user without asking. `issuer` is set when the address is known."""

    def __init__(self) -> None:
        self.issuer = ""
        self.key = rsa.generate_private_key(65537, 2048)
        self.key_id = "first"
        #: The claims of the user.
        self.user: dict[str, Any] = {"sub": "4711", "preferred_username": "ann", "groups": ["ops"]}
        #: Changes of an attacker: other claims, and other published metadata.
        self.changed_claims: dict[str, Any] = {}
        self.metadata: dict[str, Any] = {}
        #: Signs a token in place of `sign`.
        self.forge: Any = None
        self.has_id_token = True
        #: The requests to log in that wait for their code to be exchanged.
        self._codes: dict[str, dict[str, str]] = {}
        #: The parameters of the last request to log in.
        self.asked: dict[str, str] = {}
        self.app = self._make_app()

    def _make_app(self) -> Flask:
        app = Flask("provider")
        app.add_url_rule("/.well-known/openid-configuration", view_func=self.configuration)
        app.add_url_rule("/authorize", view_func=self.authorize)
        app.add_url_rule("/token", view_func=self.token, methods=["POST"])
        app.add_url_rule("/keys", view_func=self.keys)
        return app

    def configuration(self) -> Response:
        return jsonify(
            {
                "issuer": self.issuer,
                "authorization_endpoint": f"{self.issuer}/authorize",
                "token_endpoint": f"{self.issuer}/token",
                "jwks_uri": f"{self.issuer}/keys",
                "response_types_supported": ["code"],
                "subject_types_supported": ["public"],
                "id_token_signing_alg_values_supported": ["RS256", "HS256", "none"],
                **self.metadata,
            }
        )

    def keys(self) -> Response:
        numbers = self.key.public_key().public_numbers()
        key = {
            "kty": "RSA",
            "use": "sig",
            "alg": "RS256",
            "kid": self.key_id,
            "n": encoded(numbers.n.to_bytes(256, "big")),
            "e": encoded(numbers.e.to_bytes(3, "big")),
        }
        return jsonify({"keys": [key]})

    def authorize(self) -> Any:
        self.asked = request.args.to_dict()
        if request.args["client_id"] != CLIENT or request.args["response_type"] != "code":
            abort(400)
        code = secrets.token_urlsafe()
        self._codes[code] = self.asked
        answer = {"code": code, "state": self.asked["state"]}
        return redirect(f"{self.asked['redirect_uri']}?{urlencode(answer)}")

    def token(self) -> Response:
        """Exchange a code once, for the client with the secret, the verifier and the address."""
        asked = self._codes.pop(request.form["code"], None)
        client = request.authorization
        verifier = hashlib.sha256(request.form["code_verifier"].encode()).digest()
        is_right = (
            asked is not None
            and client is not None
            and (client.username, client.password) == (CLIENT, CLIENT_SECRET)
            and asked["code_challenge_method"] == "S256"
            and asked["code_challenge"] == encoded(verifier)
            and asked["redirect_uri"] == request.form["redirect_uri"]
        )
        if asked is None or not is_right:
            refused = jsonify({"error": "invalid_grant"})
            refused.status_code = 400
            return refused
        answer = {"access_token": secrets.token_urlsafe(), "token_type": "Bearer"}
        if self.has_id_token:
            answer["id_token"] = self.id_token(asked["nonce"])
        return jsonify(answer)

    def id_token(self, nonce: str) -> str:
        now = int(time.time())
        times = {"iat": now, "exp": now + 300}
        issued = {"iss": self.issuer, "aud": CLIENT, "nonce": nonce, **times, **self.user}
        claims = {**issued, **self.changed_claims}
        sign = self.forge or self.sign
        token: str = sign({name: value for name, value in claims.items() if value is not None})
        return token

    def sign(self, claims: dict[str, Any], key: rsa.RSAPrivateKey | None = None) -> str:
        text = f"{encoded_json({'alg': 'RS256', 'kid': self.key_id})}.{encoded_json(claims)}"
        signature = (key or self.key).sign(text.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{text}.{encoded(signature)}"

    def sign_with_another_key(self, claims: dict[str, Any]) -> str:
        return self.sign(claims, rsa.generate_private_key(65537, 2048))

    def sign_with_the_secret(self, claims: dict[str, Any]) -> str:
        text = f"{encoded_json({'alg': 'HS256', 'kid': self.key_id})}.{encoded_json(claims)}"
        signature = hmac.digest(CLIENT_SECRET.encode(), text.encode(), "sha256")
        return f"{text}.{encoded(signature)}"

    def leave_unsigned(self, claims: dict[str, Any]) -> str:
        return f"{encoded_json({'alg': 'none'})}.{encoded_json(claims)}."

    def change_the_signed(self, claims: dict[str, Any]) -> str:
        header, _, signature = self.sign(claims).split(".")
        return f"{header}.{encoded_json({**claims, 'sub': 'another'})}.{signature}"
