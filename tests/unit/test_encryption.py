"""Test encryption keys, their names, and the errors and messages about them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaytasks import DelayTask
from delaytasks.core.body import PREFIX, Cipher, is_encrypted, key_name
from delaytasks.core.clock import LATEST
from delaytasks.core.errors import BodyEncryptedError, ConfigError
from delaytasks.core.settings import load_settings
from delaytasks.storage.schema import BODY, RESULT
from tests.fuzzing import json_like
from tests.recording import new_key

A, B = new_key(), new_key()
#: A column, an id and a tag.
PLACE = (BODY, 7, "mail")


def settings_of(keys: Any, **environ: str) -> Any:
    return load_settings({"delaytasks_encryption_keys": keys}, environ)


def test_keys_are_a_list_or_come_from_the_environment() -> None:
    assert settings_of([A, B]).encryption_keys == (A, B)
    assert settings_of((), DELAYTASKS_ENCRYPTION_KEYS=f" {A}\n{B} ").encryption_keys == (A, B)
    assert settings_of(f"plain {A}").encryption_keys == ("plain", A)
    assert settings_of("").encryption_keys == ()


WRONG: dict[str, Any] = {
    "a password": ["password"],
    "too short": [A[:-1]],
    "too long": [A + "A"],
    "another letter": [A[:5] + "!" + A[6:]],
    "one twice": [A, A],
    "none to read with": ["plain"],
    "plain after a key": [A, "plain"],
    "plain twice": ["plain", "plain", A],
    "a number": [A, 5],
    "bytes": [A.encode()],
    "a mapping": {"a": A},
}


@pytest.mark.parametrize("keys", WRONG.values(), ids=WRONG)
def test_an_invalid_key_is_refused_and_not_shown(keys: Any) -> None:
    with pytest.raises(ConfigError, match=r"^delaytasks_encryption_keys = \*\*\*") as caught:
        settings_of(keys)
    assert A not in str(caught.value)
    assert "password" not in str(caught.value)


def test_settings_show_the_names_of_keys_only() -> None:
    settings = settings_of(["plain", A, B])
    assert A not in repr(settings)
    rows = {row[0]: row[1] for row in settings.effective()}
    assert rows["delaytasks_encryption_keys"] == f"plain {key_name(A)} {key_name(B)}"
    assert len({key_name(new_key()) for _ in range(10)}) == 10


def test_without_the_library_the_error_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install 'delaytasks\[encryption\]'"):
        Cipher([A])


@given(st.text(st.characters(blacklist_categories=("Cs",))))
def test_any_text_is_decrypted_to_itself(text: str) -> None:
    cipher = Cipher([A, B])
    sealed = cipher.seal(text, *PLACE)
    assert is_encrypted(sealed)
    assert sealed.isascii()
    assert cipher.read(sealed, *PLACE) == Cipher([B, A]).read(sealed, *PLACE) == text
    assert Cipher([B]).read(sealed, *PLACE) == sealed


@pytest.mark.parametrize(
    "place", [(RESULT, 7, "mail"), (BODY, 8, "mail"), (BODY, 7, "mail2"), (BODY, 77, "ail")]
)
def test_a_text_can_only_be_decrypted_in_its_own_row_and_column(
    place: tuple[str, int, str],
) -> None:
    cipher = Cipher([A])
    sealed = cipher.seal("[1]", *PLACE)
    assert cipher.read(sealed, *place) == sealed
    assert cipher.seal("[1]", *PLACE) != sealed, "a nonce is used once"


def test_any_tag_of_another_program_can_be_bound() -> None:
    cipher = Cipher([A])
    for tag in ("", "\ud800", "\0", 7, None, b"mail"):
        assert cipher.read(cipher.seal("[1]", BODY, 7, tag), BODY, 7, tag) == "[1]"


BEGINNINGS = (
    "{}",
    "aesgcm:{}",
    f"aesgcm:{key_name(A)}:{{}}",
)


@given(st.one_of(json_like, *(st.text().map(begin.format) for begin in BEGINNINGS)))
@example(float("nan"))
def test_any_value_in_a_row_is_decrypted_or_returned_unchanged(found: Any) -> None:
    assert repr(Cipher([A]).read(found, *PLACE)) == repr(found), "a NaN is not equal to itself"


def test_a_task_with_any_encrypted_text_can_be_shown() -> None:
    tokens = ("", "\x1b[31mr:x", f"{key_name(A)}:", f"{key_name(A)}:gAAAAA==")
    for text in (f"{PREFIX}{token}" for token in tokens):
        task = DelayTask(7, "mail", text, LATEST)
        assert task.as_json()["body"].startswith("(encrypted with key ")
        with pytest.raises(
            BodyEncryptedError, match=r"the body of task 7 is encrypted with key [0-9a-f?]+, which"
        ):
            _ = task.body
