"""Secrets do not leak.

No output contains passwords or signing keys, and bodies and headers appear only in the output of a
request for the task.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner
from sqlalchemy import make_url, text

from delaytasks import DelayTasks, Status
from delaytasks.cli.main import delays as cli_of_celery
from delaytasks.runtime import runtime_of
from delaytasks.settings import PREFIX, secret_names
from tests.integration.conftest import Deploy
from tests.proxy import WebServer, answer
from tests.running import Deployment
from tests.services import RedisServer
from tests.waiting import wait_until
from tests.world.recording import delays_on, new_key

pytestmark = pytest.mark.slow

#: SECRET appears in URLs and keys, BODY in bodies and headers.
SECRET, BODY = "sEcReT-cAnArY", "bOdY-cAnArY"
KEY = "whsec_" + base64.b64encode((SECRET * 2).encode()).decode()
HOSTILE = "\x1b[31mred\x9b1m \u202e\r\nforged line"
ENCRYPTION_KEYS = [new_key(), new_key()]
HIDDEN = (SECRET, KEY, KEY.removeprefix("whsec_"), *ENCRYPTION_KEYS)


def test_secrets_and_bodies_appear_in_no_output(
    deploy: Deploy, postgresql_url: str, start_redis: Callable[..., RedisServer], web: WebServer
) -> None:
    server = start_redis()
    server.client().config_set("requirepass", SECRET)
    redis_url = server.url.replace("redis://", f"redis://:{SECRET}@")
    # PostgreSQL accepts any password if its authentication method is `trust`.
    database = make_url(postgresql_url).set(password=SECRET).render_as_string(hide_password=False)
    settings: dict[str, Any] = {"callback_secrets": [KEY], "callback_allow": ["127.0.0.1"]}
    settings |= {"callback_broker_url": f"amqp://u:{SECRET}@127.0.0.1:1//", "timer": redis_url}
    d = deploy(database, redis_url, encryption_keys=ENCRYPTION_KEYS, **settings)
    delays, worker, beat = d.delays, d.worker("-E"), d.beat()
    web.answers["/"] = answer(500, b"busy")
    hidden, closed = {"Authorization": BODY, "X-Key": BODY}, "http://127.0.0.1:1/"
    ends = [
        d.schedule(body={"card": BODY}),
        d.schedule("test.fail", body={"card": BODY}),
        d.schedule("test.fail", body={"file": 5, "card": BODY}),
        delays.callbacks.post(web.url(), {"card": BODY}, 0, headers=hidden, retries="0s"),
        delays.callbacks.post(closed, {"card": BODY}, 0, headers=hidden, retries="0s"),
        delays.callbacks.publish("orders", {"card": BODY}, 0, headers={"key": BODY}, retries="0s"),
    ]
    d.schedule("test.nobody", body={"card": BODY})
    d.schedule(delay=3600, body={"card": BODY}, key="k")
    d.schedule("test.fail", body={"text": HOSTILE, "card": BODY})
    # Other programs insert rows too. No configured key decrypts the last one.
    d.insert(message_body=f'{{"card": {BODY}')
    d.insert(tag=HOSTILE, message_body="{}")
    d.insert(message_body="aesgcm:ffffffff:gAAAAA")
    wait_until(lambda: all(delays.get(task).is_finished for task in ends), 40, d.logs)
    rows = [delays.get(task, attempts=True) for task in ends]
    assert {row.status for row in rows} == {Status.DONE, Status.FAILED}
    worker.wait_for("no_processor")
    worker.wait_for("no_key")

    inspect = runtime_of(delays).celery.control.inspect([d.node(0)], timeout=10, limit=1)
    told = {
        "worker": worker.log(),
        "beat": beat.log(),
        "errors": str([row.error for row in rows]),
        "attempts": repr([row.attempts for row in rows]),
        "inspect": repr([inspect.conf(with_defaults=True), inspect.stats(), inspect.active()]),
        "commands": commands(d, *map(str.split, COMMANDS)),
        "table": repr(in_table(d)),
    }
    assert len(in_table(d)) == 10
    assert "Error" in told["errors"]
    assert "callback_broker_url" in told["inspect"]
    assert "test.note" in told["commands"]
    leaks = {where: name for where, log in told.items() for name in (*HIDDEN, BODY) if name in log}
    assert not leaks
    for where in ("worker", "beat", "commands"):
        assert all(line.isprintable() for line in told[where].split("\n")), told[where]
        assert "\nforged line" not in told[where]
    # These commands request the tasks, and show bodies to users who may see them.
    shown = commands(d, ["show", str(rows[0].id)], ["list", "--json"])
    assert BODY in shown
    assert not any(name in shown for name in HIDDEN)


def in_table(d: Deployment) -> list[Any]:
    """Bodies and results of our own rows, as they are stored."""
    query = f"SELECT message_body, result FROM {d.store.schema.tasks.name}"
    with d.store.database.begin() as connection:
        found = [tuple(row) for row in connection.execute(text(query))]
    return [row for row in found if row[0].startswith("aesgcm:")]


COMMANDS = "list,status,check,check --settings,db upgrade --check,log".split(",")


def commands(d: Deployment, *all: list[str]) -> str:
    """Return the output of the command line on stdout and stderr."""
    app = SimpleNamespace(app=runtime_of(d.delays).celery, no_color=True)
    found = [CliRunner().invoke(cli_of_celery, words, obj=app) for words in all]
    assert {said.exit_code for said in found} <= {0, 1}, found
    return "".join(said.output for said in found)


def test_celery_shows_none_of_the_secret_settings() -> None:
    app = Celery("shop", set_as_current=False)
    app.conf.update({PREFIX + name: [SECRET] for name in secret_names()})
    DelayTasks(app)
    shown = app.conf.table(with_defaults=False, censored=True)
    assert {name for name in secret_names() if PREFIX + name in shown} == set(secret_names())
    assert SECRET not in json.dumps(shown)
    assert SECRET not in app.bugreport()


def test_the_error_about_a_refused_body_does_not_show_the_body(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bodies: list[Any] = [{"card": BODY, "x": object()}, BODY * 100_000]
    with caplog.at_level(logging.DEBUG), closing(delays_on("sqlite://")) as delays:
        for body in bodies:
            with pytest.raises(ValueError) as caught:
                delays.schedule_delay("mail", body, 5)
            assert BODY not in str(caught.value)
    assert BODY not in caplog.text
