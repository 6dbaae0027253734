"""Use delaytasks in web frameworks and in tests.

The type checkers find nothing but the errors that are marked. No test runs this module.
"""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from flask import Flask
from typing_extensions import assert_type

from delaytasks import DelayedTask, DelayTasks
from delaytasks.callbacks import Received, verify, webhook
from delaytasks.console import Role, UserFile, Viewer, make_console
from delaytasks.contrib import asgi
from delaytasks.contrib import flask as flask_mounts
from delaytasks.contrib.asgi import delays_lifespan
from delaytasks.contrib.flask import FlaskDelays
from delaytasks.http_api.api_keys import ApiKeyFile, ApiKeys, new_entry
from delaytasks.http_api.routes import make_api
from delaytasks.testing import ANY, DelaysTester, Run, create_tables

app = Flask("shop")
delays = FlaskDelays(app)
web = FastAPI(lifespan=delays_lifespan(delays))


def viewer(request: object) -> Viewer | None:
    return Viewer("ann", Role.OPERATE)


console = make_console(delays, viewer, secret_key="secret")
make_console(delays, UserFile(Path("console-users.json")))
key, entry = new_entry(["read"])
api = make_api(delays, ApiKeys({"shop": entry}))
flask_mounts.mount(app, "/delays", console)
asgi.mount(web, "/delays", make_api(delays, ApiKeyFile(Path("api-keys.json"))))


@app.post("/closed")
@webhook("whsec_c2VjcmV0")
def closed(callback: Received) -> tuple[str, int]:
    return callback.id, 200


@web.post("/aclosed")
@webhook(["whsec_c2VjcmV0"])
async def aclosed(callback: Received) -> dict[str, str]:
    return {"id": callback.id}


assert_type(verify(b"", {}, "whsec_c2VjcmV0"), Received)


def test_an_order_is_closed(delays: DelayTasks, delays_tester: DelaysTester) -> None:
    assert_type(delays_tester.assert_scheduled("order.close", body=ANY, within="30m"), DelayedTask)
    assert_type(delays_tester.fast_forward("1h", raises=False), list[Run])
    create_tables(object(), delays)


async def test_asynchronously(delays_tester: DelaysTester) -> None:
    assert_type(await delays_tester.aassert_scheduled("order.close", key="7"), DelayedTask)


with DelaysTester(delays, bind=None) as tester:
    tester.stop()
    assert_type(tester.start(), DelaysTester)
