"""Timeouts that heartbeats extend: `python -m examples.heartbeats`."""

from __future__ import annotations

import time

from examples.stage import Stage


def main() -> None:
    with Stage("examples.heartbeats.app") as stage:
        from examples.heartbeats.app import delays, disconnect, heartbeats

        stage.make_tables()
        stage.start_worker()

        def lost() -> set[str]:
            done = delays.find(tag="device.lost", status="DONE").tasks
            return {task.body["device"] for task in done}

        devices = [f"device-{number}" for number in range(1, 101)]
        stage.say("100 devices send heartbeats, each second")
        heartbeats(devices)
        disconnect("device-1")
        stage.say("device-1 says goodbye, device-2 falls silent")
        silent_since = time.monotonic()
        while "device-2" not in lost():
            heartbeats(devices[2:])
            time.sleep(0.5)
        after_s = time.monotonic() - silent_since
        stage.say(f"device-2 is reported as lost, {after_s:.1f} s after its last heartbeat")
        assert lost() == {"device-2"}, lost()
        waiting = delays.find(tag="device.lost", status="NOT_COMPLETE", limit=1000).tasks
        stage.say(f"{len(waiting)} devices are connected, and each has one row")
        assert len(waiting) == 98
        delays.close()


if __name__ == "__main__":
    main()
