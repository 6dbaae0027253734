"""Test the `redis` timer on many kinds of servers.

Servers are full, use ACLs or TLS, or form a cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.cluster import RedisCluster
from redis.exceptions import NoPermissionError

from tests import services as redis_server
from tests.conftest import closing_all
from tests.services import RedisServer, Server, free_port, redis_answers, redis_program, self_signed
from tests.waiting import wait_until
from tests.world.recording import RedisTimerHarness

Start = Callable[..., RedisServer]
LIMIT_S = 0.5


class Bench(RedisTimerHarness):
    def close(self) -> None:
        self.timer.link.close()  # its entries end with the server

    def hears(self, listener: Any) -> None:
        wait_until(lambda: listener.get_message(timeout=1), 10, "a message")


Connect = Callable[..., Bench]


@pytest.fixture
def connect() -> Iterator[Connect]:
    with closing_all(Bench) as connect:
        yield connect


def test_entries_can_be_taken_from_a_full_redis(start_redis: Start, connect: Connect) -> None:
    bench = connect(start_redis().url)
    bench.timer.arm([bench.entry(id) for id in range(1, 1001)])
    bench.timer.link.connect().config_set("maxmemory", 1)
    assert not bench.timer.arm([bench.entry(2000)])
    assert bench.events.counts["timer.down"] == 1
    wait_until(lambda: bench.try_take({}) is not None, 5, "the timer to try again")
    assert bench.take_ids(1000) == list(range(1, 1001))


# -- users ----------------------------------------------------------------------------------------


KINDS = ("shop_web", "shop_worker")
PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text()


def allow(kind: str, *servers: RedisServer, more: str = "") -> str:
    """Create a user with the documented rights, and return the URL of that user."""
    [rules] = re.findall(rf"^ACL SETUSER {kind} (.+)$", PAGE, re.MULTILINE)
    for server in servers:
        server.client().execute_command("ACL", "SETUSER", kind, *rules.split(), *more.split())
    return servers[0].url.replace("://", f"://{kind}:secret@")


def let_work(web: Bench, worker: Bench, many: int = 1) -> None:
    """Let one timer arm entries, and another one hear of them, take them and hand them on."""
    listener = worker.timer.listen(["default"])
    assert web.timer.arm([web.entry(id) for id in range(1, many + 1)]), web.events.counts
    worker.hears(listener)
    taken = worker.take()
    assert sum(len(some.entries) for some in taken) == many
    worker.hand_on(taken)
    assert worker.members("store") == worker.members("prepare") == []
    assert web.events.counts["timer.down"] == worker.events.counts["timer.down"] == 0


def test_the_documented_rights_allow_the_work_only(start_redis: Start, connect: Connect) -> None:
    server = start_redis()
    web, worker = (connect(allow(kind, server), namespace="shop") for kind in KINDS)
    let_work(web, worker)
    for refused in (["GET", "x"], ["ZADD", "x", 1, "y"], ["FLUSHALL"], ["PUBLISH", "x", "y"]):
        with pytest.raises(NoPermissionError):
            worker.timer.link.connect().execute_command(*refused)
    stranger = connect(allow("shop_web", server), namespace="other")
    assert not stranger.timer.arm([stranger.entry(1)])


# -- TLS ------------------------------------------------------------------------------------------


def knows_tls(program: str) -> bool:
    options = "--port 0 --tls-port 1 --tls-cert-file /".split()
    said = subprocess.run([program, *options], capture_output=True)
    return b"Bad directive" not in said.stdout + said.stderr


def test_tls_connections_check_certificates(
    tmp_path: Path, start_redis: Start, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("redis-server", "valkey-server")
    found = [shutil.which(name, path=place) for name in names for place in os.get_exec_path()]
    programs = [program for program in found if program is not None and knows_tls(program)]
    if not programs or shutil.which("openssl") is None:
        pytest.skip("needs a redis-server with TLS, and openssl")
    monkeypatch.setattr(redis_server, "redis_program", lambda: programs[0])
    (key, certificate), port = self_signed(tmp_path), free_port()
    options = f"--tls-port {port} --tls-cert-file {certificate} --tls-key-file {key} "
    options += f"--tls-ca-cert-file {certificate} --tls-auth-clients no"
    start_redis(*options.split())
    bench = connect(f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}")
    let_work(bench, bench)
    distrusting = connect(f"rediss://localhost:{port}/0")
    assert not distrusting.timer.arm([distrusting.entry(1)])


# -- clusters and Sentinels -----------------------------------------------------------------------

SLOTS = 16_384


@pytest.fixture
def cluster(start_redis: Start, tmp_path: Path) -> list[RedisServer]:
    """Start three nodes that share the slots."""
    servers = []
    for number in range(3):
        options = f"--cluster-enabled yes --cluster-config-file {tmp_path}/nodes-{number}.conf"
        servers.append(start_redis(*options.split(), "--cluster-node-timeout", "2000"))
    nodes = [server.client() for server in servers]
    for number, node in enumerate(nodes):
        first, last = (SLOTS * step // len(nodes) for step in (number, number + 1))
        node.execute_command("CLUSTER", "ADDSLOTS", *range(first, last))
        node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for server in servers[1:]:
        nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", server.port)

    def is_formed() -> bool:
        found = [node.execute_command("CLUSTER", "INFO") for node in nodes]
        return all(b"state:ok" in info and b"known_nodes:3" in info for info in found)

    wait_until(is_formed, 30, "the cluster to form", every_s=0.1)
    return servers


@pytest.mark.slow
def test_the_nodes_of_a_cluster_share_the_slots_and_are_used_while_one_fails(
    cluster: list[RedisServer], connect: Connect
) -> None:
    bench = connect(cluster[1].url)
    assert isinstance(bench.timer.link.connect(), RedisCluster)
    listener = bench.timer.listen(["default"])
    entries = [bench.entry(id, id, priority=id % 11 // 10) for id in range(1, 2001)]
    assert bench.timer.arm(entries), bench.events.counts
    held = [len(list(server.client().scan_iter("*.store"))) for server in cluster]
    assert min(held) > 0, f"every node has some: {held}"
    bench.hears(listener)
    bench.clock.advance(2)
    found = bench.take_ids(1000)
    while portion := bench.take_ids(1000):
        found += portion
    # What was late by more than the grace is left out.
    assert sorted(found) == list(range(1000, 2001))

    [more] = re.findall(r"^In a cluster both need `([^`]+)` as well", PAGE, re.MULTILINE)
    urls = [allow(kind, *cluster, more=more) for kind in KINDS]
    web, worker = (connect(url, namespace="shop") for url in urls)
    let_work(web, worker, 100)

    for server in cluster:
        server.client().config_set("cluster-require-full-coverage", "no")
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    bench = connect(f"{nobody};{cluster[0].url}", _publish_limit_s=LIMIT_S)
    entries = [bench.entry(id) for id in range(1, 201)]
    wait_until(lambda: bench.timer.arm(entries), 10, "the second URL to be tried")
    keys = {entry: bench.timer.keys(bench.timer.slot(entry))[0] for entry in entries}
    node_of: Any = bench.timer.link.connect().get_node_from_key
    left = [entry for entry in entries if node_of(keys[entry]).port != cluster[0].port]
    assert 0 < len(left) < len(entries)
    assert bench.timer.is_reachable()
    cluster[0].stop()
    wait_until(lambda: bench.timer.arm(left), 15, "the other nodes to be armed again", every_s=0.1)
    assert not bench.timer.is_reachable(), "a part of it cannot be used"


class SentinelServer(Server):
    """A Sentinel, which writes to its configuration file in this test's folder."""

    name = "Sentinel"
    _stops_by = signal.SIGKILL

    def __init__(self, folder: Path, primary: RedisServer) -> None:
        options = [f"monitor shop 127.0.0.1 {primary.port} 1", "failover-timeout shop 5000"]
        options.append("down-after-milliseconds shop 1000")
        file, self.port = folder / "sentinel.conf", free_port()
        file.write_text("".join(f"sentinel {option}\n" for option in options))
        command = [redis_program(), str(file), "--sentinel", "--port", str(self.port)]
        super().__init__(command, folder / "sentinel.log")

    def _answers(self) -> bool:
        return redis_answers(f"redis://127.0.0.1:{self.port}/0")

    def knows_replica(self) -> bool:
        with Redis(port=self.port) as client:
            return bool(client.execute_command("SENTINEL", "REPLICAS", "shop"))


@pytest.mark.slow
def test_sentinels_lead_to_the_primary_and_after_a_failover_to_the_new_one(
    start_redis: Start, tmp_path: Path, connect: Connect, request: pytest.FixtureRequest
) -> None:
    primary = start_redis()
    replica = start_redis("--replicaof", "127.0.0.1", str(primary.port))

    def of_replica(name: str) -> Any:
        return replica.client().info("replication").get(name)

    wait_until(lambda: of_replica("master_link_status") == "up", 15, "the replica")
    sentinel = SentinelServer(tmp_path, primary)
    request.addfinalizer(sentinel.stop)
    wait_until(sentinel.knows_replica, 30, "the Sentinel", every_s=0.1)
    urls = f"sentinel://127.0.0.1:{free_port()};sentinel://127.0.0.1:{sentinel.port}/0"
    bench = connect(urls, {"master_name": "shop"}, _publish_limit_s=LIMIT_S)
    wait_until(lambda: bench.timer.arm([bench.entry(1)]), 10, "the primary to be found")
    listener = bench.timer.listen(["default"])
    assert bench.timer.arm([bench.entry(2, -1)])
    bench.hears(listener)
    assert len(bench.members("store")) == 2
    primary.stop()
    wait_until(lambda: bench.timer.arm([bench.entry(3)]), 30, "the new primary", every_s=0.1)
    assert of_replica("role") == "master"
    assert bench.timer.is_up
