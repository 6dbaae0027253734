"""Signatures of callbacks, as specified by Standard Webhooks."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from delaytasks.model.clock import wall_ms
from delaytasks.model.errors import ConfigError, InvalidInputError
from delaytasks.model.text import SecretBytes

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
#: A callback is refused if its timestamp differs by more than this: it may be a replay.
TOLERANCE_S = 300.0
#: Secrets begin with this prefix, by which tools recognize and hide them.
_PREFIX = "whsec_"
#: The lengths that the standard allows.
_KEY_BYTES = range(24, 65)


class Received(NamedTuple):
    """A callback with a valid signature.

    A callback may arrive several times, each time with the same `id`.
    """

    id: str
    body: Any


class SigningKeys:
    """Secrets of the form `whsec_…`. While one replaces another, both are valid."""

    def __init__(self, secrets: str | Iterable[str]) -> None:
        secrets = secrets.split() if isinstance(secrets, str) else list(secrets)
        self._keys = [_key(secret, number) for number, secret in enumerate(secrets, 1)]

    def __len__(self) -> int:
        return len(self._keys)

    def sign(self, id: str, timestamp: str, payload: bytes) -> str:
        """Return a signature by each key. The receiver needs one of the keys."""
        return " ".join(self._signatures(id.encode(), timestamp.encode(), payload))

    def match(self, id: bytes, timestamp: bytes, payload: bytes, given: bytes) -> bool:
        """Return whether `given` has a signature by one of the keys, in constant time."""
        right = [signature.encode() for signature in self._signatures(id, timestamp, payload)]
        found = False
        for signature in given.split():
            for expected in right:
                found |= hmac.compare_digest(signature, expected)
        return found

    def _signatures(self, id: bytes, timestamp: bytes, payload: bytes) -> list[str]:
        signed = b".".join((id, timestamp, payload))
        return [
            "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
            for key in self._keys
        ]


def verify(
    payload: bytes,
    headers: Mapping[str, str],
    secrets: str | Iterable[str],
    *,
    tolerance_s: float = TOLERANCE_S,
) -> Received:
    """Check the signature of a callback, and return the callback.

    Parameters
    ----------
    payload
        The body of the request, exactly as it arrived.
    headers
        The headers of the request.
    secrets
        The secrets of the form `whsec_…`, as a list or separated by spaces. The callback must be
        signed by one of them.
    tolerance_s
        The largest allowed difference between the callback's timestamp and this host's clock.

    Returns
    -------
    Received
        The callback's id and its body.

    Raises
    ------
    InvalidInputError
        If `argument` is "headers", the callback is not signed by one of the secrets, or its
        timestamp is too old or too new: answer with status 401. If it is "body", the body is not
        JSON: answer with status 400.
    ConfigError
        `secrets` is empty, or has a secret that is not of the form `whsec_…`.

    Examples
    --------
    >>> received = verify(request.get_data(), request.headers, secrets)
    >>> ship(received.body["order"])
    """
    keys = SigningKeys(secrets)
    if not keys:
        raise ConfigError("no signature can be checked without a secret")
    lowered = {name.lower(): value for name, value in headers.items()}
    id, timestamp, given = (
        lowered.get(name, "").encode(errors="replace") for name in (ID, TIMESTAMP, SIGNATURE)
    )
    if not (id and timestamp and given):
        raise InvalidInputError(
            f"the headers {ID}, {TIMESTAMP} and {SIGNATURE} are required", "headers"
        )
    if not keys.match(id, timestamp, payload, given):
        raise InvalidInputError("no signature is by one of the secrets", "headers")
    if not timestamp.isdigit() or abs(wall_ms() / 1000 - int(timestamp[:12])) > tolerance_s:
        raise InvalidInputError(
            f"signed more than {tolerance_s:g} s ago, or in the future; are both clocks right?",
            "headers",
        )
    try:
        return Received(id.decode(), json.loads(payload))
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"the callback's body is not JSON ({error})", "body") from None


def _key(secret: str, number: int) -> bytes:
    prefix, text = secret[: len(_PREFIX)], secret[len(_PREFIX) :]
    try:
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if prefix != _PREFIX or len(key) not in _KEY_BYTES:
        raise ConfigError(
            f"callback secret {number} is not of the form whsec_…, base64 of 24 to 64 bytes"
        )
    return SecretBytes(key)
