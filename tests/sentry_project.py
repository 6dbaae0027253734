"""A project that reports to Sentry, and writes its reports to a file instead of a server."""

from __future__ import annotations

import json
import os
from typing import Any

import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport

from delaytasks import DelayedTask, Fail, Retry, processor
from delaytasks.contrib.sentry import DelayTasksIntegration

FILE = "DELAYTASKS_TEST_ENVELOPES"


class FileTransport(Transport):
    """Appends each item as a line, which the operating system writes as a whole."""

    def capture_envelope(self, envelope: Envelope) -> None:
        with open(os.environ[FILE], "a") as file:
            for item in envelope.items:
                content: Any = item.payload.json or json.loads(item.get_bytes() or b"{}")
                file.write(json.dumps({**content, "item": item.type}) + "\n")


def init_sentry(**options: Any) -> None:
    usual = {"transport": FileTransport, "traces_sample_rate": 1.0}
    sentry_sdk.init("http://key@127.0.0.1/1", **{**usual, **options})


if FILE in os.environ:
    is_default = "DELAYTASKS_TEST_SENTRY" in os.environ
    init_sentry(integrations=[] if is_default else [DelayTasksIntegration()])


class OrderError(Exception):
    pass


@processor("sentry.fails_twice", retries=[0.1])
@processor("sentry.fails")
def fails(body: dict[str, Any], task: DelayedTask) -> None:
    sentry_sdk.set_tag("from_processor", body["word"])
    raise OrderError(f"order {task.id} is broken")


@processor("sentry.returns_fail")
def returns_fail(body: dict[str, Any]) -> Fail:
    return Fail("the card was declined")


@processor("sentry.retries", retries=[0.1])
def retries(body: dict[str, Any], task: DelayedTask) -> Retry | None:
    return Retry() if task.runs == 1 else None


@processor("sentry.batch", batch=10)
def batch(bodies: list[dict[str, Any]], tasks: list[DelayedTask]) -> dict[int, Any]:
    return {task.id: Fail("odd") for task in tasks if task.body["number"] % 2}


@processor("sentry.async")
async def fails_on_the_loop(body: dict[str, Any]) -> None:
    raise OrderError("in a coroutine")


@processor("sentry.kills")
def kill_the_process(body: dict[str, Any]) -> None:
    os._exit(1)


@processor("sentry.quiet")
def does_nothing(body: dict[str, Any]) -> None: ...
