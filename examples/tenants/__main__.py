"""One recurring schedule per tenant: `python -m examples.tenants`."""

from __future__ import annotations

from examples.stage import Stage

TENANTS = {"acme": "Europe/Berlin", "globex": "America/New_York", "initech": "Asia/Tokyo"}


def main() -> None:
    with Stage("examples.tenants.app") as stage:
        from examples.tenants.app import add_tenant, delays, remove_tenant, send_now

        stage.make_tables()
        stage.start_worker()
        for name, tz in TENANTS.items():
            add_tenant(name, tz)
            [first] = delays.recurring.next(f"report-{name}", 1)
            stage.say(f"{name} gets its next report at {first.isoformat()} ({tz})")
        delays.recurring.pause("report-globex", actor="billing")
        stage.say("globex has not paid: its schedule is paused")
        id = send_now("acme")
        stage.wait_until(lambda: delays.get(id).status.name == "DONE", "the report of acme")
        stage.say("acme asked for a report between two occurrences, and has it")
        delays.recurring.set(
            "clock-initech", "report.send", {"tenant": "initech"}, every="1s", meta={"clock": "1"}
        )
        stage.wait_until(
            lambda: len(delays.find(meta={"clock": "1"}, status="DONE").tasks) >= 3,
            "three occurrences",
        )
        stage.say("a schedule of initech with every=1s has run three times")
        remove_tenant("initech")
        delays.recurring.remove("clock-initech")
        names = [schedule.name for schedule in delays.recurring.list()]
        stage.say(f"initech leaves; schedules: {', '.join(names)}")
        assert names == ["report-acme", "report-globex"]
        delays.close()


if __name__ == "__main__":
    main()
