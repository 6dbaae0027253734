"""URLs, errors and the `repr` of our objects show no password and no key."""

from __future__ import annotations

import base64
import io
import pickle
import traceback
from collections.abc import Iterable
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import URL

from delaytasks import DelayTasks
from delaytasks.core.errors import ConfigError
from delaytasks.core.settings import load_settings
from delaytasks.core.text import Secret, mask_secret, mask_url
from delaytasks.runtime import runtime_of
from delaytasks.timers.redis_timer import redis_location
from tests.recording import new_key

WORD = "sEcReT-cAnArY"
SIGNING = "whsec_" + base64.b64encode((WORD * 2).encode()).decode()
KEYS = [new_key(), new_key()]
SECRETS = [WORD, SIGNING, SIGNING.removeprefix("whsec_"), *KEYS, repr((WORD * 2).encode())[2:-1]]

URLS = [
    f":{WORD}@h:6379/0",
    f"user:{WORD}@h:6379/0",
    f"{WORD}@h:6379",
    f"//:{WORD}@h",
    f"redis://:{WORD}@h/0",
    f"redis://:my {WORD}@h/0",
    f"redis://:a@b;{WORD}@h/0",
    f"amqp://h1/;amqp://u:{WORD}@h2",
    f"amqp://u:{WORD}@h1/;amqp://u:{WORD}@h2/",
    f"redis://h1/0;:{WORD}@h2/0",
    f":{WORD}@h1;redis://h2",
    f"unix:///run/redis.sock?password={WORD}",
    f"mysql://h/shop?ssl_key_password={WORD}&charset=utf8",
    f"sqs://h?aws_secret_access_key={WORD}",
    f"postgresql://h/shop?passfile=x&sslpassword={WORD}",
    SIGNING,
]


@pytest.mark.parametrize("url", URLS)
def test_no_url_and_no_part_of_one_shows_a_secret(url: str) -> None:
    for shown in (mask_url(url), mask_secret(url), repr(Secret(url)), f"{[Secret(url)]}"):
        assert not any(secret in shown for secret in SECRETS), shown


def test_a_text_without_a_secret_is_not_masked() -> None:
    for url in (
        "redis://h:6379/0",
        "https://h/path?mail=a@b",
        "amqp://guest@h//",
        "sqlite:////srv/shop/delays.sqlite3",
        "postgresql://h/shop?sslmode=require",
    ):
        assert mask_url(url) == mask_secret(url) == url
    assert (
        mask_url(f"postgresql://shop:{WORD}@h/shop?sslmode=require")
        == "postgresql://shop:***@h/shop?sslmode=require"
    )
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
    for given, broker in ((url, ""), ("", url)):
        with pytest.raises(ConfigError) as caught:
            redis_location(given, broker)
        assert WORD not in str(caught.value)
    settings = load_settings({"delaytasks_redis_url": url}, {})
    assert WORD not in repr(settings.effective())
    with pytest.raises(ConfigError) as caught:
        redis_location(settings.redis_url, "")
    frames = [frame for frame in traceback.StackSummary.extract(
        traceback.walk_tb(caught.value.__traceback__), capture_locals=True
    ) if Path(frame.filename).parent.name == "timers"]  # fmt: skip
    assert frames
    assert WORD not in repr([frame.locals for frame in frames])


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
            slots = [
                name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())
            ]
            held = {
                **getattr(found, "__dict__", {}),
                **{name: getattr(found, name, None) for name in slots},
            }
            left += [(f"{way}.{name}", each) for name, each in held.items()]


def test_nothing_that_is_reachable_from_delays_shows_a_secret(tmp_path: Path) -> None:
    app = Celery("hidden", broker="memory://", set_as_current=False)
    delays = DelayTasks(
        app,
        f"postgresql://shop:{WORD}@h/shop",
        timer="redis",
        redis_url=f"redis://:{WORD}@h/0",
        callback_secrets=[SIGNING],
        callback_broker_url=f"amqp://u:{WORD}@h//",
        encryption_keys=KEYS,
    )
    before = [repr(vars(delays))]
    assert delays.settings.redis_url == f"redis://:{WORD}@h/0", "it can still be used"
    assert runtime_of(delays).store.database.auto.url.password == WORD
    shown = {way: repr(found) for way, found in everything(delays)}
    assert len(shown) > 200
    leaks = {way: text for way, text in shown.items() if any(secret in text for secret in SECRETS)}
    assert not leaks, [*leaks][:10]
    assert not any(secret in before[0] for secret in SECRETS)
    delays.close()


def test_a_wrong_setting_shows_no_secret_in_its_traceback() -> None:
    for wrong in (
        {"encryption_keys": [WORD]},
        {"callback_secrets": [WORD]},
        {"database_url": f"x://:{WORD}@h"},
    ):
        delays = DelayTasks(Celery("wrong", broker="memory://", set_as_current=False), **wrong)
        assert WORD not in repr(vars(delays))
        with pytest.raises(ConfigError) as caught:
            _ = delays.settings
        text = io.StringIO()
        text.writelines(traceback.TracebackException.from_exception(caught.value).format())
        assert WORD not in text.getvalue()
