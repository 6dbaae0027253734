"""A shop that notifies a partner about payments until the partner answers."""

from __future__ import annotations

import os
from typing import Any

from flask import Flask, request

from delaytasks.contrib.flask import FlaskDelays

#: Delays between the attempts. `RetrySchedule.NOTIFY`, the default, has ten attempts within a day.
RETRIES = "1s 1s 5s"
#: Here it is of this example only. In production, a secret comes from the environment.
SECRET = "whsec_b25seSBvZiB0aGlzIGV4YW1wbGUsIG5vdCBzZWNyZXQ="

delays = FlaskDelays()


def create_app() -> Flask:
    shop = Flask("shop")
    shop.config["CELERY"] = {"broker_url": os.environ["CELERY_BROKER_URL"]}
    shop.config["DELAYTASKS"] = {
        "callback_secrets": [SECRET],
        # By default, callbacks reach public addresses with https only.
        "callback_allow": ["127.0.0.1"],
    }
    delays.init_app(shop)

    @shop.post("/payments/<int:number>")
    def pay(number: int) -> tuple[dict[str, Any], int]:
        task = delays.callbacks.post(
            request.json["notify"],
            {"payment": number, "cents": request.json["cents"]},
            0,
            retries=RETRIES,
            key=f"payment-{number}",
        )
        return {"notification": str(task.id)}, 201

    return shop


web = create_app()
#: For `celery -A examples.flask_webhooks.shop worker`.
app = web.extensions["celery"]
