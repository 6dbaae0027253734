"""Logins with OpenID Connect: a provider authenticates, and a claim of its token names the role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from delaytasks.console.viewers import Role, Viewer
from delaytasks.core.errors import ConfigError

#: Signatures that are accepted. A provider signs with a key that clients do not know.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
#: Seconds that an answer of the provider may take, and that its clock may be off.
PROVIDER_LIMIT_S, CLOCK_LEEWAY_S = 10.0, 60
#: The claims of which the first one names the viewer.
NAME_CLAIMS = ("preferred_username", "email", "sub")
_ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class OpenIDAccess:
    """Viewers log in at an OpenID provider, and have the role that a claim of the ID token names.

    The console registers as a client with a secret. It uses the authorization code flow with
    `state`, `nonce` and PKCE. The role is that of the login, until the session ends.

    Parameters
    ----------
    issuer
        The address of the provider, whose `/.well-known/openid-configuration` is read.
    client_id, client_secret
        The id and the secret of the console at the provider.
    claim
        The claim of the ID token with the roles or groups of a user: a text or a list of texts.
    roles
        The role of the console for each value of the claim. A user has the highest role of all
        values. A user without any of them is refused.

    Raises
    ------
    ConfigError
        If the issuer is not an https address, or something is missing.

    Examples
    --------
    >>> OpenIDAccess("https://login.shop.example", "console", secret, "groups", {"ops": Role.ADMIN})
    """

    has_login = True

    def __init__(
        self,
        issuer: str,
        client_id: str,
        client_secret: str,
        claim: str,
        roles: Mapping[str, Role],
    ) -> None:
        if not _is_secure(issuer):
            raise ConfigError(f"the OpenID issuer is an https address, not {issuer!r:.80}")
        for name, value in (("client", client_id), ("secret", client_secret), ("role", roles)):
            if not value:
                raise ConfigError(f"the {name} of the OpenID login is missing")
        self._issuer = issuer
        self._client_id = client_id
        self._client_secret = client_secret
        self._claim = claim
        self._roles = dict(roles)

    def viewer(self, environ: Mapping[str, Any], session: Mapping[str, Any]) -> Viewer | None:
        """Return the viewer of a session that began with a login at this provider."""
        if session.get("issuer") != self._issuer:
            return None
        return Viewer.of(session["user"], session["role"])

    def make_client(self) -> Any:
        """Return a client of Authlib that has read the configuration of the provider.

        Raises
        ------
        ConfigError
            If the provider is another one than the issuer, or its endpoints or signatures are not
            secure.
        """
        from authlib.integrations.flask_client import OAuth
        from flask import current_app

        client = OAuth(current_app).register(
            "openid",
            client_id=self._client_id,
            client_secret=self._client_secret,
            server_metadata_url=f"{self._issuer.rstrip('/')}/.well-known/openid-configuration",
            client_kwargs={
                "scope": "openid profile email",
                "code_challenge_method": "S256",
                "default_timeout": PROVIDER_LIMIT_S,
            },
        )
        found = client.load_server_metadata()
        if found.get("issuer") != self._issuer:
            raise ConfigError(f"the OpenID provider {self._issuer} calls itself another one")
        for name in _ENDPOINTS:
            if not _is_secure(str(found.get(name))):
                raise ConfigError(f"the {name} of {self._issuer} is not an https address")
        offered = found.get("id_token_signing_alg_values_supported", ["RS256"])
        accepted = [each for each in ALGORITHMS if each in offered]
        if not accepted:  # Authlib would take an empty list for a missing one
            raise ConfigError(f"{self._issuer} offers no signature of {', '.join(ALGORITHMS)}")
        found["id_token_signing_alg_values_supported"] = accepted
        return client

    def session_of(self, client: Any) -> dict[str, str] | None:
        """Return what the session of a user keeps, from the answer that the browser brings.

        Returns
        -------
        dict or None
            None if the user has no role.

        Raises
        ------
        Exception
            If the answer is not that of the provider to a login that this session has begun.
        """
        essential = {"essential": True}
        token = client.authorize_access_token(
            leeway=CLOCK_LEEWAY_S,
            claims_options={
                "iss": {**essential, "value": self._issuer},
                "aud": {**essential, "value": self._client_id},
                "sub": essential,
                "exp": essential,
                "nonce": essential,
            },
        )
        claims = token["userinfo"]  # missing if the answer has no ID token
        role = self._role_of(claims.get(self._claim))
        names = (claims.get(name) for name in NAME_CLAIMS)
        name = next(each for each in names if isinstance(each, str) and each.strip())
        if role is None:
            return None
        return {"issuer": self._issuer, "user": name, "role": role.label}

    def _role_of(self, found: object) -> Role | None:
        values = found if isinstance(found, list) else [found]
        roles = [
            self._roles[each] for each in values if isinstance(each, str) and each in self._roles
        ]
        return max(roles, default=None)


def _is_secure(address: str) -> bool:
    """Return whether an address is https, or one of this machine."""
    parts = urlsplit(address)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in _LOOPBACK)
