"""URLs, errors, files and encrypted bodies show no password and no key."""

from __future__ import annotations

import base64
import os
import pickle
import stat
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from hypothesis import example, given
from hypothesis import strategies as st
from kombu import Connection
from sqlalchemy import URL, text

from delaytasks import BodyEncryptedError, ConfigError, DelayedTask, DelayTasks
from delaytasks.attachment import file_broker_url
from delaytasks.core.body import PREFIX, Cipher, is_encrypted, key_name
from delaytasks.core.clock import LATEST
from delaytasks.core.private_files import make_folder, tighten_data_folder, tighten_folder
from delaytasks.core.settings import load_settings
from delaytasks.core.text import Secret, mask_secret, mask_url
from delaytasks.runtime import runtime_of
from delaytasks.storage import migrations
from delaytasks.storage.schema import BODY, RESULT
from delaytasks.timers.redis_timer import redis_location
from tests.fuzzing import json_like
from tests.world.recording import new_key

# -- URLs, errors and the `repr` of our objects show no password and no key -----------------------


WORD = "sEcReT-cAnArY"
SIGNING = "whsec_" + base64.b64encode((WORD * 2).encode()).decode()
KEYS = [new_key(), new_key()]
SECRETS = [WORD, SIGNING, SIGNING.removeprefix("whsec_"), *KEYS, repr((WORD * 2).encode())[2:-1]]

URLS = [
    f":{WORD}@h:6379/0", f"user:{WORD}@h:6379/0", f"{WORD}@h:6379", f"//:{WORD}@h", SIGNING,
    f"redis://:{WORD}@h/0", f"redis://:my {WORD}@h/0", f"redis://:a@b;{WORD}@h/0",
    f"amqp://h1/;amqp://u:{WORD}@h2", f"amqp://u:{WORD}@h1/;amqp://u:{WORD}@h2/",
    f"redis://h1/0;:{WORD}@h2/0", f":{WORD}@h1;redis://h2", f"sqs://h?aws_secret_access_key={WORD}",
    f"unix:///run/redis.sock?password={WORD}", f"mysql://h/shop?ssl_key_password={WORD}&charset=utf8",
    f"postgresql://h/shop?passfile=x&sslpassword={WORD}",
]  # fmt: skip


@pytest.mark.parametrize("url", URLS)
def test_no_url_and_no_part_of_one_shows_a_secret(url: str) -> None:
    for shown in (mask_url(url), mask_secret(url), repr(Secret(url)), f"{[Secret(url)]}"):
        assert not any(secret in shown for secret in SECRETS), shown


HARMLESS = [
    *("redis://h:6379/0", "https://h/path?mail=a@b", "amqp://guest@h//"),
    *("sqlite:////srv/shop/delays.sqlite3", "postgresql://h/shop?sslmode=require"),
]


def test_a_text_without_a_secret_is_not_masked() -> None:
    for url in HARMLESS:
        assert mask_url(url) == mask_secret(url) == url
    rest = "@h/shop?sslmode=require"
    assert mask_url(f"postgresql://shop:{WORD}{rest}") == f"postgresql://shop:***{rest}"
    assert mask_secret("") == ""
    assert mask_secret("localhost:6379") == "***", "nobody can tell what it is"


def test_a_secret_can_be_used_like_any_other_text() -> None:
    secret = Secret(f"redis://:{WORD}@h")
    assert secret == f"redis://:{WORD}@h" == str(secret) == f"{secret}"
    assert type(pickle.loads(pickle.dumps(secret))) is Secret
    assert WORD not in repr(vars(load_settings)) + repr({secret: [secret]})


@pytest.mark.parametrize(
    "url", [f":{WORD}@h:6379/0", WORD, f"redi://:{WORD}@h", f"redis://:{WORD}@h:x/0"]
)
def test_a_redis_url_that_is_wrong_is_not_shown(url: str) -> None:
    """Error reporters send the error and its traceback with the local variables."""
    for redis_url, broker in ((url, ""), ("", url)):
        with pytest.raises(ConfigError) as caught:
            redis_location(redis_url, broker)
        assert WORD not in str(caught.value)
    if "://" not in url:
        with pytest.raises(ConfigError) as caught:
            load_settings({"delaytasks_timer": url}, {})
        assert WORD not in str(caught.value)
        return
    settings = load_settings({"delaytasks_timer": url}, {})
    assert WORD not in repr(settings.effective())
    with pytest.raises(ConfigError) as caught:
        redis_location(settings.redis_url, "")
    stack = traceback.walk_tb(caught.value.__traceback__)
    frames = traceback.StackSummary.extract(stack, capture_locals=True)
    ours = [frame.locals for frame in frames if Path(frame.filename).parent.name == "timers"]
    assert ours
    assert WORD not in repr(ours)


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


def test_nothing_that_is_reachable_from_delays_shows_a_secret(tmp_path: Path) -> None:
    delays = DelayTasks(
        Celery("hidden", broker="memory://", set_as_current=False),
        f"postgresql://shop:{WORD}@h/shop",
        timer=f"redis://:{WORD}@h/0",
        callback_secrets=[SIGNING],
        callback_broker_url=f"amqp://u:{WORD}@h//",
        encryption_keys=KEYS,
    )
    before = [repr(vars(delays))]
    assert delays.settings.timer == f"redis://:{WORD}@h/0", "it can still be used"
    assert runtime_of(delays).store.database.auto.url.password == WORD
    shown = {way: repr(found) for way, found in everything(delays)}
    assert len(shown) > 200
    leaks = {way: text for way, text in shown.items() if any(secret in text for secret in SECRETS)}
    assert not leaks, [*leaks][:10]
    assert not any(secret in before[0] for secret in SECRETS)
    delays.close()


@pytest.mark.parametrize("name", ["encryption_keys", "callback_secrets", "database_url"])
def test_a_wrong_setting_shows_no_secret_in_its_traceback(name: str) -> None:
    wrong = f"x://:{WORD}@h" if name == "database_url" else [WORD]
    app = Celery("wrong", broker="memory://", set_as_current=False)
    delays = DelayTasks(app, **{name: wrong})
    assert WORD not in repr(vars(delays))
    with pytest.raises(ConfigError) as caught:
        _ = delays.settings
    assert WORD not in "".join(traceback.format_exception(caught.value))


# -- only the owner can read the data folder and its files, whatever the umask is -----------------


pytestmark = pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DELAYTASKS_DATABASE_URL", raising=False)
    return tmp_path / "project" / ".delaytasks"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def assert_private(folder: Path) -> None:
    """Check the modes of a folder and of everything in it."""
    found = {path: oct(mode(path)) for path in (folder, *folder.rglob("*"))}
    assert len(found) > 1
    assert {path: each for path, each in found.items() if int(each, 8) & 0o077} == {}


def test_the_embedded_database_and_its_files_are_private(open_umask: None, data: Path) -> None:
    app = Celery("private", broker="memory://", set_as_current=False)
    delays = DelayTasks(app, data_dir=str(data))
    migrations.upgrade(runtime_of(delays).store.database)
    delays.schedule_delay("mail", {"card": 1}, 60)
    with runtime_of(delays).store.database.begin() as connection:
        connection.execute(text("DELETE FROM yb_delay_task_message"))
        names = {f"delays.sqlite3{end}" for end in ("", "-wal", "-shm")}
        assert {path.name for path in data.iterdir()} >= names
        assert_private(data)
    delays.close()
    assert mode(data) == 0o700
    assert mode(data / "delays.sqlite3") == 0o600


def test_the_broker_of_files_is_private(open_umask: None, data: Path) -> None:
    (data / "broker").mkdir(parents=True, mode=0o755)
    with Connection(file_broker_url(str(data))) as connection:
        connection.SimpleQueue("orders").put({"card": 1})
        assert any(path.suffix == ".msg" for path in data.rglob("*"))
        assert_private(data)


def test_a_shared_folder_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project, shared, linked = tmp_path / "project", tmp_path / "shared", tmp_path / "linked"
    bits = {tmp_path: 0o755, project: 0o755, shared: 0o1777}
    for folder in bits:
        folder.mkdir(exist_ok=True)
        folder.chmod(bits[folder])
    monkeypatch.chdir(project)
    for folder in bits:
        tighten_folder(folder)
        assert mode(folder) == bits[folder]
    (project / "delays.sqlite3").touch(mode=0o644)
    (project / "orders.sqlite3").touch(mode=0o644)
    tighten_data_folder(Path("."))
    assert [mode(project / name) for name in ("delays.sqlite3", "orders.sqlite3")] == [0o600, 0o644]
    make_folder(linked)
    make_folder(linked)
    assert mode(linked) == 0o700


# -- test encryption keys, their names, and the errors and messages about them --------------------


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


def test_settings_show_the_names_of_keys_only() -> None:
    settings = settings_of(["plain", A, B])
    assert A not in repr(settings)
    rows = {row[0]: row[1] for row in settings.effective()}
    assert rows["delaytasks_encryption_keys"] == f"plain {key_name(A)} {key_name(B)}"
    assert len({key_name(new_key()) for _ in range(10)}) == 10


def test_without_the_library_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
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


BEGINNINGS = ("{}", "aesgcm:{}", f"aesgcm:{key_name(A)}:{{}}")


@given(st.one_of(json_like, *(st.text().map(begin.format) for begin in BEGINNINGS)))
@example(float("nan"))
def test_any_value_in_a_row_is_decrypted_or_returned_unchanged(found: Any) -> None:
    assert repr(Cipher([A]).read(found, *PLACE)) == repr(found), "a NaN is not equal to itself"


def test_a_task_with_any_encrypted_text_can_be_shown() -> None:
    tokens = ("", "\x1b[31mr:x", f"{key_name(A)}:", f"{key_name(A)}:gAAAAA==")
    for sealed in (f"{PREFIX}{token}" for token in tokens):
        task = DelayedTask(7, "mail", sealed, LATEST)
        assert task.as_json()["body"].startswith("(encrypted with key ")
        error = r"the body of task 7 is encrypted with key [0-9a-f?]+, which"
        with pytest.raises(BodyEncryptedError, match=error):
            _ = task.body
