"""Reminders of appointments with FastAPI: `python -m examples.fastapi_reminders`."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import httpx

from examples.stage import Stage, free_port


def main() -> None:
    port = free_port()
    with Stage("examples.fastapi_reminders.app") as stage:
        from examples.fastapi_reminders.app import BEFORE, delays

        stage.make_tables()
        command = ["uvicorn", "examples.fastapi_reminders.app:web", f"--port={port}"]
        stage.start("web", command, lambda log: "startup complete" in log)
        stage.start_worker()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as web:
            soon = datetime.now(timezone.utc) + BEFORE + timedelta(seconds=3)
            for patient in ("ada", "bob", "cyd"):
                given = {"patient": patient, "starts_at": soon.isoformat()}
                assert web.post("/appointments", json=given).status_code == 201
            stage.say("ada, bob and cyd have appointments, and a reminder is scheduled for each")
            later = {"starts_at": (soon + timedelta(hours=1)).isoformat()}
            assert web.patch("/appointments/bob", json=later).is_success
            stage.say("bob comes an hour later, and his reminder moves with the appointment")
            assert web.delete("/appointments/cyd").is_success
            stage.say("cyd calls it off, and the reminder is cancelled")
            assert web.post("/appointments", json={"patient": "ada", **later}).status_code == 409
            stage.say("a second appointment of ada is refused, and its reminder is rolled back")
            assert web.delete("/appointments/dan").status_code == 404
            for patient in ("", " ", "dan ", "dan\n", "d" * 101):
                given = {"patient": patient, **later}
                assert web.post("/appointments", json=given).status_code == 422
            stage.say("dan has no appointment to call off, and names that do not fit are refused")
            stage.wait_until(lambda: "ada is reminded" in stage.log("worker"), "ada's reminder")
            stage.say("ada is reminded")
            assert web.patch("/appointments/ada", json=later).is_success
            stage.say("her appointment moves after that, and she gets another reminder")
        waiting = [
            task.key for task in delays.find(tag="appointment.remind", status="NOT_COMPLETE")
        ]
        stage.say(f"reminders that wait: {', '.join(sorted(map(str, waiting)))}")
        assert set(waiting) == {"ada", "bob"}
        assert "cyd" not in stage.log("worker")
        delays.close()


if __name__ == "__main__":
    main()
