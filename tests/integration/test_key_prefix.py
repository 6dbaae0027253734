"""With `global_keyprefix` the log names the keys that an operator finds in Redis."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from delaytasks.runtime import runtime_of
from tests.running import Deployment
from tests.services import RedisServer
from tests.waiting import SLACK_S, wait_until

pytestmark = pytest.mark.slow


def test_a_blocked_key_is_logged_with_its_prefix(
    tmp_path: Path, postgresql_url: str, start_redis: Callable[..., RedisServer]
) -> None:
    server = start_redis()
    options = {"broker_transport_options": {"global_keyprefix": "shop_"}}
    d = Deployment(tmp_path, postgresql_url, server.url, options)
    key = "shop_" + runtime_of(d.delays).publisher.queue("default").name
    try:
        worker = d.worker(concurrency=1)
        with server.client() as redis:
            redis.delete(key)
            redis.set(key, "x")
            wait_until(lambda: "queue.blocked" in worker.log(), 10 + SLACK_S, worker.log)
            assert key in worker.log()
            redis.delete(key)
        wait_until(lambda: "queue.unblocked" in worker.log(), 10 + SLACK_S, worker.log)
    finally:
        d.close()
