"""The partner, which refuses the first two attempts, and verifies the signature of the third."""

from __future__ import annotations

from itertools import count

from flask import Flask

from delaytasks.callbacks import Received, webhook
from examples.flask_webhooks.shop import SECRET

web = Flask("partner")
attempts = count(1)
#: A callback may arrive twice: store its id with its effect.
seen: set[str] = set()


@web.post("/paid")
@webhook(SECRET)
def paid(callback: Received) -> tuple[str, int]:
    if next(attempts) <= 2:
        return "come back later", 503
    if callback.id not in seen:
        seen.add(callback.id)
        print(f"payment {callback.body['payment']} is booked", flush=True)
    return "", 204
