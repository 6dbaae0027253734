"""Result backends and queues of RabbitMQ that work in another way than those of the other tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.durable_eta.conftest import begin, end

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "conf",
    [
        {"result_backend": "rpc://"},
        {
            "task_default_queue_type": "quorum",
            "task_default_exchange_type": "topic",
            "worker_detect_quorum_queues": True,
        },
    ],
    ids=["rpc", "quorum"],
)
def test_a_durable_task_runs_and_has_a_result(
    tmp_path: Path, postgresql_url: str, rabbitmq_url: str, redis_url: str, conf: dict[str, object]
) -> None:
    project = begin(tmp_path, postgresql_url, rabbitmq_url, redis_url, **conf)
    try:
        project.start_worker()
        result = project.task("add").apply_async((1, 2), countdown=0.5)
        assert result.get(timeout=30) == 3
        assert [row.key for row in project.rows("add")] == [result.id]
    finally:
        end(project)
