"""Signatures of callbacks agree with the package of the Standard Webhooks specification."""

from __future__ import annotations

import base64
import hmac
import time
from datetime import datetime, timezone
from types import SimpleNamespace

import pytest
from standardwebhooks import Webhook

from delaytasks import ConfigError
from delaytasks.callbacks import Received, signatures, verify
from delaytasks.callbacks.signatures import SigningKeys
from tests.refusals import invalid

PAYLOAD = '{"order":7,"name":"é"}'.encode()


def secret(letter: str) -> str:
    return "whsec_" + base64.b64encode(letter.encode() * 32).decode()


OLD, NEW, OTHER = secret("o"), secret("n"), secret("x")


def signed(*secrets: str, age_s: int = 0, at: str = "", payload: bytes = PAYLOAD) -> dict[str, str]:
    timestamp = at or str(int(time.time()) - age_s)
    signature = SigningKeys(secrets).sign("42", timestamp, payload)
    return {"webhook-id": "42", "webhook-timestamp": timestamp, "webhook-signature": signature}


def test_signatures_of_the_official_package_are_verified() -> None:
    now = datetime.now(timezone.utc)
    signature = Webhook(NEW).sign("42", now, PAYLOAD.decode())
    headers = {"Webhook-Id": "42", "Webhook-Timestamp": str(int(now.timestamp()))}
    headers["Webhook-Signature"] = f"v1a,zz {signature}"
    assert verify(PAYLOAD, headers, NEW) == Received("42", {"order": 7, "name": "é"})


def test_both_keys_are_valid_while_one_replaces_the_other() -> None:
    both = signed(OLD, NEW)
    for known in (OLD, NEW):
        assert Webhook(known).verify(PAYLOAD, both)
        assert verify(PAYLOAD, both, known).id == "42"
    for sender in (OLD, NEW):
        assert verify(PAYLOAD, signed(sender), f"{OLD} {NEW}").id == "42"
        assert verify(PAYLOAD, signed(sender), [OLD, NEW]).id == "42"


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in signed(NEW).items() if key != name}


BAD: dict[str, dict[str, str]] = {
    **{f"no {name}": without(f"webhook-{name}") for name in ("id", "timestamp", "signature")},
    "another secret": signed(OTHER),
    "another id": {**signed(NEW), "webhook-id": "43"},
    "another time": {**signed(NEW), "webhook-timestamp": str(int(time.time()) - 1)},
    "another body": signed(NEW, payload=b"{}"),
    "stale": signed(NEW, age_s=310),
    "from the future": signed(NEW, age_s=-4000),
    "no version": {**signed(NEW), "webhook-signature": signed(NEW)["webhook-signature"][3:]},
    "not ASCII": {**signed(NEW), "webhook-signature": "v1,é\ud800"},
    "not a time": signed(NEW, at="now"),
}


@pytest.mark.parametrize("headers", BAD.values(), ids=BAD.keys())
def test_a_missing_bad_or_stale_signature_is_refused(headers: dict[str, str]) -> None:
    with invalid("headers"):
        verify(PAYLOAD, headers, NEW)


def test_signatures_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hmac.compare_digest` compares all pairs, even after a match."""
    compared: list[tuple[bytes, bytes]] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    spied = SimpleNamespace(digest=hmac.digest, compare_digest=compare)
    monkeypatch.setattr(signatures, "hmac", spied)
    given = signed(NEW)
    given["webhook-signature"] += " v1,AAAA v1,BBBB"
    assert verify(PAYLOAD, given, [NEW, OLD]).id == "42"
    assert len({one for one, _ in compared}) == 3
    assert len({other for _, other in compared}) == 2
    assert len(compared) == 6


@pytest.mark.parametrize(
    "bad", ["", "whsec_", "whsec_é", "whsec_!!!!", "whsec_c2hvcnQ=", "whsec_" + "A" * 100, "A" * 43]
)
def test_an_invalid_secret_is_an_error_that_does_not_show_it(bad: str) -> None:
    with pytest.raises(ConfigError, match="secret 2") as raised:
        SigningKeys([NEW, bad])
    assert bad == "" or bad.removeprefix("whsec_") == "" or bad not in str(raised.value)


def test_a_secret_is_needed_and_needs_no_padding() -> None:
    with pytest.raises(ConfigError):
        verify(PAYLOAD, signed(NEW), "")
    assert verify(PAYLOAD, signed(NEW, age_s=250), NEW.rstrip("=")).id == "42"
