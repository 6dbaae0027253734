"""Move an existing Celery project: `python -m examples.moving_celery`."""

from __future__ import annotations

from examples.stage import Stage

OLD, TAG = 5, "celery:shop.remind"


def main() -> None:
    with Stage("examples.moving_celery.after") as stage:
        stage.make_tables()
        from examples.moving_celery.before import order_placed

        for order in range(OLD):
            order_placed(order, remind_after_s=8)
        stage.say(f"the project of before sends {OLD} messages with a countdown to the broker")

        from examples.moving_celery.after import app, delays

        stage.start_worker()
        order_placed(100, remind_after_s=1)
        revoked = order_placed(101, remind_after_s=60)
        assert len(delays.find(tag=TAG).tasks) == 2
        stage.say("two new calls are rows, although no call has changed")
        app.control.revoke(revoked)
        assert delays.find(tag=TAG, status="CANCELLED").tasks
        stage.say("revoke has cancelled the row of one of them")
        stage.wait_until(
            lambda: "order 100 is not paid yet" in stage.log("worker"), "the new reminder"
        )
        stage.say("the reminder of the new order has run")
        stage.wait_until(
            lambda: all(f"order {n} is not paid yet" in stage.log("worker") for n in range(OLD)),
            "the old reminders",
        )
        stage.say(f"and so have the {OLD} old messages, which Celery still delivers")
        delays.close()


if __name__ == "__main__":
    main()
