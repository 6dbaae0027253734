"""Webhooks with a retry schedule: `python -m examples.flask_webhooks`."""

from __future__ import annotations

import requests

from examples.stage import Stage, free_port


def main() -> None:
    ports = {"shop": free_port(), "partner": free_port()}
    with Stage("examples.flask_webhooks.shop") as stage:
        from examples.flask_webhooks.shop import delays, web

        stage.make_tables()
        stage.start_worker()
        for name, port in ports.items():
            command = ["flask", "--app", f"examples.flask_webhooks.{name}:web", "run"]
            stage.start(name, [*command, f"--port={port}"], lambda log: "Running on" in log)
        answer = requests.post(
            f"http://127.0.0.1:{ports['shop']}/payments/7",
            json={"cents": 250, "notify": f"http://127.0.0.1:{ports['partner']}/paid"},
            timeout=20,
        )
        id = int(answer.json()["notification"])
        stage.say(f"payment 7 is paid, and task {id} notifies the partner")
        with web.app_context():
            stage.wait_until(lambda: delays.get(id).status.name == "DONE", "the notification")
            for attempt in delays.get(id, attempts=True).attempts:
                stage.say(f"attempt {attempt.number}: {attempt.error}")
            stage.say(f"attempt {delays.get(id).runs}: the partner has it")
            assert delays.get(id).runs == 3
        assert "payment 7 is booked" in stage.log("partner")
        stage.say("the partner has verified the signature, and has booked the payment once")


if __name__ == "__main__":
    main()
