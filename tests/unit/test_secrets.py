"""Errors, objects and files show no password and no key."""

from __future__ import annotations

import base64
import os
import re
import stat
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from kombu import Connection
from sqlalchemy import URL, create_engine, text

from delaytasks import ConfigError, DelayTasks, StoreError
from tests.running import output_of
from tests.world.recording import delays_on, new_key

WORD = "sEcReT-cAnArY"
SIGNING = "whsec_" + base64.b64encode((WORD * 2).encode()).decode()
A, B = new_key(), new_key()
SECRETS = [WORD, SIGNING, SIGNING.removeprefix("whsec_"), A, B, repr((WORD * 2).encode())[2:-1]]


def everything(start: object) -> Iterable[tuple[str, object]]:
    """Yield the attributes of our objects and the items of their containers, each with its path."""
    # Keep each visited object, because a new object could get the id of a deleted one.
    seen: dict[int, object] = {}
    left: list[tuple[str, object]] = [("delays", start)]
    while left:
        way, found = left.pop()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        yield way, found
        if isinstance(found, dict):
            left += [(f"{way}[{key!r}]", each) for key, each in list(found.items())]
        elif isinstance(found, (list, tuple, set, frozenset)) and not isinstance(found, URL):
            left += [(f"{way}[]", each) for each in found]
        elif type(found).__module__.startswith("delaytasks"):
            kinds = type(found).__mro__
            slots = [name for kind in kinds for name in getattr(kind, "__slots__", ())]
            held = dict(vars(found)) if hasattr(found, "__dict__") else {}
            held |= {name: getattr(found, name, None) for name in slots}
            left += [(f"{way}.{name}", each) for name, each in held.items()]


def test_nothing_that_is_reachable_from_delays_shows_a_secret() -> None:
    delays = delays_on(
        f"postgresql://shop:{WORD}@127.0.0.1:1/shop",
        timer=f"redis://:{WORD}@127.0.0.1:1/0",
        callback_secrets=[SIGNING],
        callback_broker_url=f"amqp://u:{WORD}@h//",
        encryption_keys=[A, B],
    )
    before = repr(vars(delays))
    assert delays.settings.timer == f"redis://:{WORD}@127.0.0.1:1/0", "it can still be used"
    with pytest.raises(StoreError) as caught:
        delays.schedule_delay("mail", {}, 60)
    shown = {way: repr(found) for way, found in everything(delays)}
    assert len(shown) > 200
    leaks = {way: text for way, text in shown.items() if any(secret in text for secret in SECRETS)}
    assert not leaks, [*leaks][:10]
    said = before + "".join(traceback.format_exception(caught.value))
    assert not any(secret in said for secret in SECRETS)
    delays.close()


WRONG_SETTINGS: list[tuple[str, Any]] = [("encryption_keys", [WORD]), ("callback_secrets", [WORD])]
WRONG_SETTINGS += [("database_url", f"x://:{WORD}@h"), ("timer", f":{WORD}@h:6379/0")]
WRONG_SETTINGS += [("timer", f"redi://:{WORD}@h"), ("timer", f"redis://:{WORD}@h:x")]


@pytest.mark.parametrize(("name", "value"), WRONG_SETTINGS)
def test_a_wrong_setting_shows_no_secret_in_its_traceback(name: str, value: Any) -> None:
    """Error reporters send the traceback with the local variables of the code of the broker."""
    app = Celery("wrong", broker="memory://", set_as_current=False)
    delays = DelayTasks(app, **{"database_url": "sqlite://", name: value})
    assert WORD not in repr(vars(delays))
    with pytest.raises(ConfigError) as caught:
        delays.schedule_delay("mail", {}, 60)
    stack = traceback.walk_tb(caught.value.__traceback__)
    frames = traceback.StackSummary.extract(stack, capture_locals=True)
    ours = [frame.locals for frame in frames if "/delaytasks/broker/" in frame.filename]
    assert ours or name != "timer" or value.startswith(":")
    assert WORD not in "".join([*traceback.format_exception(caught.value), str(ours)])


# -- only the owner can read the data folder and its files, whatever the umask is -----------------


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Return the modes of the folder and of everything in it."""
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_the_embedded_database_and_the_broker_of_files_are_private(
    open_umask: None, tmp_path: Path
) -> None:
    data = tmp_path / ".delaytasks"
    env = {**os.environ, "DELAYTASKS_DATA_DIR": data.name, "DELAYTASKS_DATABASE_URL": ""}
    output_of([sys.executable, "-m", "delaytasks", "db", "upgrade"], tmp_path, env)
    assert modes(data)["delays.sqlite3"] == 0o600
    with closing(delays_on("", data_dir=str(data), tags="any")) as delays:
        delays.schedule_delay("mail", {"card": 1}, 60)
        with Connection(f"delaytasks-files://localhost/{data}") as connection:
            connection.SimpleQueue("orders").put({"card": 1})
        engine = create_engine(f"sqlite:///{data / 'delays.sqlite3'}")
        with engine.begin() as other_program:
            other_program.execute(text("DELETE FROM yb_delay_task_message"))
            found = modes(data)
        engine.dispose()
    assert found.keys() >= {f"delays.sqlite3{end}" for end in ("", "-wal", "-shm")}
    assert any(name.endswith(".msg") for name in found)
    assert not [name for name, mode in found.items() if mode & 0o077]


# -- encryption keys, their names, and the errors and messages about them -------------------------


def settings_of(keys: Any) -> Any:
    return delays_on("sqlite://", encryption_keys=keys).settings


def test_keys_are_a_list_or_a_text_and_their_names_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert settings_of([A, B]).encryption_keys == (A, B)
    assert settings_of("").encryption_keys == ()
    monkeypatch.setenv("DELAYTASKS_ENCRYPTION_KEYS", f" plain {A}\n{B} ")
    settings = delays_on("sqlite://").settings
    assert settings.encryption_keys == ("plain", A, B)
    assert A not in repr(settings)
    rows = {row[0]: row[1] for row in settings.effective()}
    names = re.fullmatch("plain ([0-9a-f]{8}) ([0-9a-f]{8})", rows["delaytasks_encryption_keys"])
    assert names is not None
    assert names[1] != names[2]


WRONG: dict[str, Any] = {
    "a password": ["password"], "too short": [A[:-1]], "too long": [A + "A"], "one twice": [A, A],
    "another letter": [A[:5] + "!" + A[6:]], "none to read with": ["plain"], "a number": [A, 5],
    "plain after a key": [A, "plain"], "plain twice": ["plain", "plain", A],
    "bytes": [A.encode()], "a mapping": {"a": A},
}  # fmt: skip


@pytest.mark.parametrize("keys", WRONG.values(), ids=WRONG)
def test_an_invalid_key_is_refused_and_not_shown(keys: Any) -> None:
    with pytest.raises(ConfigError, match=r"^delaytasks_encryption_keys = \*\*\*") as caught:
        settings_of(keys)
    assert A not in str(caught.value)
    assert "password" not in str(caught.value)


def test_without_the_library_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install 'delaytasks\[encryption\]'"):
        delays_on("sqlite://", encryption_keys=[A]).schedule_delay("mail", {}, 60)
