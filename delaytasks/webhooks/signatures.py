"""Signatures of callbacks, as Standard Webhooks has them: made by who sends, checked by who receives."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from delaytasks.core.clock import wall_ms
from delaytasks.core.errors import BodyNotJSONError, ConfigError, InvalidSignatureError
from delaytasks.core.masking import SecretBytes

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
#: A callback that is older, or from the future by more, may be a recording.
TOLERANCE_S = 300.0
#: By which secrets are known, so that they are not shown.
_PREFIX = "whsec_"
#: The standard's bounds.
_KEY_BYTES = range(24, 65)


class Received(NamedTuple):
    """A callback whose signature is right. A callback may come several times, each time with the same id."""

    id: str
    body: Any


class SigningKeys:
    """Secrets of the form `whsec_…`. Several of them overlap while one takes the place of another."""

    def __init__(self, secrets: str | Iterable[str]) -> None:
        secrets = secrets.split() if isinstance(secrets, str) else list(secrets)
        self._keys = [_key(secret, number) for number, secret in enumerate(secrets, 1)]

    def __len__(self) -> int:
        return len(self._keys)

    def sign(self, id: str, timestamp: str, payload: bytes) -> str:
        """With all keys, of which the receiver needs to know one."""
        return " ".join(self._signatures(id.encode(), timestamp.encode(), payload))

    def match(self, id: bytes, timestamp: bytes, payload: bytes, given: bytes) -> bool:
        """Whether one of the signatures given is by one of the keys, in a time that does not tell how near it came."""
        right = [signature.encode() for signature in self._signatures(id, timestamp, payload)]
        found = False
        for signature in given.split():
            for each in right:
                found |= hmac.compare_digest(signature, each)
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
    """The callback in a request: `payload` is the request's body as it came, byte for byte.

    `InvalidSignatureError` (answer 401) if it is not signed by one of the secrets, or not now; `BodyNotJSONError`
    (answer 400) if it is not JSON.
    """
    keys = SigningKeys(secrets)
    if not keys:
        raise ConfigError("without a secret no signature can be checked")
    lowered = {name.lower(): value for name, value in headers.items()}
    id, timestamp, given = (
        lowered.get(name, "").encode(errors="replace") for name in (ID, TIMESTAMP, SIGNATURE)
    )
    if not (id and timestamp and given):
        raise InvalidSignatureError(f"the headers {ID}, {TIMESTAMP} and {SIGNATURE} are needed")
    if not keys.match(id, timestamp, payload, given):
        raise InvalidSignatureError("no signature is by one of the secrets")
    if not timestamp.isdigit() or abs(wall_ms() / 1000 - int(timestamp[:12])) > tolerance_s:
        raise InvalidSignatureError(
            f"signed more than {tolerance_s:g} s ago, or in the future; are both clocks right?"
        )
    try:
        return Received(id.decode(), json.loads(payload))
    except (ValueError, RecursionError) as error:
        raise BodyNotJSONError(f"the callback's body is not JSON ({error})") from None


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
