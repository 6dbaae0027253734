"""Keys, what they are called, and what is said of them."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from delaytasks import DelayTask
from delaytasks.core.encryption import is_encrypted, key_name, new_key
from delaytasks.core.errors import BodyEncryptedError, ConfigError
from delaytasks.core.settings import load_settings
from delaytasks.store.cipher import Cipher, cipher_of
from delaytasks.store.types import LATEST
from tests.fuzzing import json_like

A, B = new_key(), new_key()


def settings_of(keys: Any, **environ: str) -> Any:
    return load_settings({"delaytasks_encryption_keys": keys}, environ)


def test_keys_come_as_a_list_or_by_the_environment() -> None:
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
def test_what_is_no_key_is_refused_and_not_shown(keys: Any) -> None:
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


def test_without_the_library_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.fernet", None)
    with pytest.raises(ConfigError, match=r"pip install 'delaytasks\[encryption\]'"):
        cipher_of([A])
    assert cipher_of([]) is None


@given(st.text(st.characters(blacklist_categories=("Cs",))))
def test_any_text_comes_back(text: str) -> None:
    cipher = Cipher([A, B])
    sealed = cipher.seal(text)
    assert is_encrypted(sealed)
    assert sealed.isascii()
    assert cipher.read(sealed) == Cipher([B, A]).read(sealed) == text
    assert Cipher([B]).read(sealed) == sealed


@given(st.text() | st.text().map("fernet:{}".format) | st.text().map(f"fernet:{key_name(A)}:{{}}".format) | json_like)
@example(float("nan"))
def test_whatever_is_in_a_row_is_read_or_left(found: Any) -> None:
    assert repr(Cipher([A]).read(found)) == repr(found), "a NaN is not equal to itself"


def test_a_task_with_any_encrypted_text_can_be_shown() -> None:
    for text in ("fernet:", "fernet:\x1b[31mr:x", f"fernet:{key_name(A)}:", f"fernet:{key_name(A)}:gAAAAA=="):
        task = DelayTask(7, "mail", text, LATEST)
        assert task.as_json()["body"].startswith("(encrypted with key ")
        with pytest.raises(BodyEncryptedError, match=r"the body of task 7 is encrypted with key [0-9a-f?]+, which"):
            _ = task.body
