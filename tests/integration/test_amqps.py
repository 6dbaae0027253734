"""Workers and producers reach RabbitMQ through TLS only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.running import Deployment
from tests.waiting import wait_until

pytestmark = pytest.mark.slow


def test_tasks_run_in_time_over_amqps_and_a_client_without_the_certificate_sends_none(
    tmp_path: Path, postgresql_url: str, amqps: dict[str, Any]
) -> None:
    d = Deployment(
        tmp_path,
        postgresql_url,
        amqps["broker_url"],
        amqps,
        sweep_s=30,
        self_sweep_s=60,
        grace_s=20,
        horizon_s=90,
    )
    try:
        d.worker()
        task = d.schedule(delay=0.5)
        # The deadline is shorter than the sweep interval, so no sweep armed the task.
        d.wait_for([task], deadline_s=10)
        assert d.delays.events.counts["timer.down"] == 0
        d.conf = {**d.conf, "broker_use_ssl": {"cert_reqs": 2, "server_hostname": "localhost"}}
        distrusting = d.producer()
        distrusting.schedule_delay("test.note", {"file": str(d.file)}, 5)
        wait_until(lambda: distrusting.events.counts["timer.down"], 10, "the refusal")
        distrusting.close()
    finally:
        d.close()
