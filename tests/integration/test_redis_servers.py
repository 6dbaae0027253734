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
from tests.integration.outages.conftest import LIMIT_S
from tests.services import RedisServer, Server, free_port, redis_answers, redis_program, self_signed
from tests.waiting import in_child, wait_until
from tests.world.recording import RedisTimerHarness

Start = Callable[..., RedisServer]
Connect = Callable[..., RedisTimerHarness]


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[RedisTimerHarness] = []

    def connect(url: str, *options: dict[str, Any], **settings: Any) -> RedisTimerHarness:
        made.append(RedisTimerHarness(url, *options, **settings))
        return made[-1]

    yield connect
    for bench in made:
        bench.timer.link.close()


def test_a_forked_child_has_a_connection_of_its_own(start_redis: Start, connect: Connect) -> None:
    bench = connect(start_redis().url)

    def arm(ids: range) -> bool:
        return all(bench.timer.arm([bench.entry(id)]) for id in ids)

    def arm_own() -> bool:
        return bench.timer.link._client is None and arm(range(100, 200))

    assert bench.timer.arm([bench.entry(1)])
    assert in_child(arm_own, meanwhile=lambda: arm(range(2, 100)))
    assert bench.take_ids() == list(range(1, 200))


# -- full -----------------------------------------------------------------------------------------


def test_entries_can_be_taken_from_a_full_redis(start_redis: Start, connect: Connect) -> None:
    bench = connect(start_redis().url)
    bench.timer.arm([bench.entry(id) for id in range(1, 1001)])
    bench.timer.link.connect().config_set("maxmemory", 1)
    assert not bench.timer.arm([bench.entry(2000)])
    assert bench.events.counts["timer.down"] == 1
    wait_until(lambda: bench.timer.take({}) is not None, 5, "the timer to try again")
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


def let_work(web: RedisTimerHarness, worker: RedisTimerHarness, many: int = 1) -> None:
    """Let one timer arm entries, and another one hear of them, take them and hand them on."""
    listener = worker.timer.listen(["default"])
    assert web.timer.arm([web.entry(id) for id in range(1, many + 1)]), web.events.counts
    wait_until(lambda: listener.get_message(timeout=1), 10, "the worker to hear of it")
    taken = worker.take()
    assert sum(len(some.entries) for some in taken) == many
    worker.hand_on(taken)
    assert worker.timer.counts(["default"]) == {"default": (0, 0)}
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


@pytest.fixture
def tls(
    tmp_path: Path, start_redis: Start, monkeypatch: pytest.MonkeyPatch
) -> tuple[RedisServer, str]:
    """Return a server with a self-signed certificate, and a URL that trusts the certificate."""
    folders = os.get_exec_path()
    names = ("redis-server", "valkey-server")
    found = [shutil.which(name, path=folder) for name in names for folder in folders]
    programs = [program for program in found if program is not None and knows_tls(program)]
    if not programs or shutil.which("openssl") is None:
        pytest.skip("needs a redis-server with TLS, and openssl")
    monkeypatch.setattr(redis_server, "redis_program", lambda: programs[0])
    (key, certificate), port = self_signed(tmp_path), free_port()
    options = f"--tls-port {port} --tls-cert-file {certificate} --tls-key-file {key} "
    options += f"--tls-ca-cert-file {certificate} --tls-auth-clients no"
    server = start_redis(*options.split())
    return server, f"rediss://localhost:{port}/0?ssl_ca_certs={certificate}"


def knows_tls(program: str) -> bool:
    options = "--port 0 --tls-port 1 --tls-cert-file /".split()
    said = subprocess.run([program, *options], capture_output=True)
    return b"Bad directive" not in said.stdout + said.stderr


def test_tls_connections_check_certificates(tls: tuple[RedisServer, str], connect: Connect) -> None:
    _, url = tls
    bench = connect(url)
    let_work(bench, bench)
    distrusting = connect(url.partition("?")[0])
    assert not distrusting.timer.arm([distrusting.entry(1)])


# -- cluster --------------------------------------------------------------------------------------

SLOTS = 16_384


@pytest.fixture
def cluster(start_redis: Start, tmp_path: Path) -> list[RedisServer]:
    """Start three nodes that share the slots."""
    servers = []
    for number in range(3):
        options = f"--cluster-enabled yes --cluster-config-file {tmp_path}/nodes-{number}.conf"
        servers.append(start_redis(*options.split(), "--cluster-node-timeout", "2000"))
    nodes = [Redis(port=server.port) for server in servers]
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
def test_a_clusters_nodes_share_the_slots(cluster: list[RedisServer], connect: Connect) -> None:
    bench = connect(cluster[1].url)
    assert isinstance(bench.timer.link.connect(), RedisCluster)
    listener = bench.timer.listen(["default"])
    entries = [bench.entry(id, id, priority=id % 11 // 10) for id in range(1, 2001)]
    assert bench.timer.arm(entries), bench.events.counts
    held = [len(list(Redis(port=server.port).scan_iter("*.store"))) for server in cluster]
    assert min(held) > 0, f"every node has some: {held}"
    wait_until(lambda: listener.get_message(timeout=1), 10, "a message, whichever node it came to")
    bench.clock.advance(2)
    found = bench.take_ids(1000)
    while portion := bench.take_ids(1000):
        found += portion
    # What was late by more than the grace is left out.
    assert sorted(found) == list(range(1000, 2001))


@pytest.mark.slow
def test_cluster_users_need_the_added_rights(cluster: list[RedisServer], connect: Connect) -> None:
    [more] = re.findall(r"^In a cluster both need `([^`]+)` as well", PAGE, re.MULTILINE)
    urls = [allow(kind, *cluster, more=more) for kind in KINDS]
    web, worker = (connect(url, namespace="shop") for url in urls)
    let_work(web, worker, 100)


@pytest.mark.slow
def test_a_cluster_is_used_while_a_node_fails(cluster: list[RedisServer], connect: Connect) -> None:
    for server in cluster:
        server.client().config_set("cluster-require-full-coverage", "no")
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    bench = connect(f"{nobody};{cluster[0].url}", _publish_limit_s=LIMIT_S)
    entries = [bench.entry(id) for id in range(1, 201)]
    wait_until(lambda: bench.timer.arm(entries), 10, "the second URL to be tried")
    keys = {entry: bench.timer.keys(bench.timer.slot(entry))[0] for entry in entries}
    connection = bench.timer.link.connect()
    assert isinstance(connection, RedisCluster)
    node_of = connection.get_node_from_key
    left = [entry for entry in entries if node_of(keys[entry]).port != cluster[0].port]
    assert 0 < len(left) < len(entries)
    cluster[0].stop()
    wait_until(lambda: bench.timer.arm(left), 15, "the other nodes to be armed again", every_s=0.1)


@pytest.mark.slow
def test_sentinels_lead_to_the_primary_and_after_a_failover_to_the_new_one(
    start_redis: Start, tmp_path: Path, connect: Connect, request: pytest.FixtureRequest
) -> None:
    primary = start_redis()
    replica = start_redis("--replicaof", "127.0.0.1", str(primary.port))

    def of_replica(name: str) -> Any:
        return replica.client().info("replication").get(name)

    wait_until(lambda: of_replica("master_link_status") == "up", 15, "the replica")
    options = [f"monitor shop 127.0.0.1 {primary.port} 1", "failover-timeout shop 5000"]
    options.append("down-after-milliseconds shop 1000")
    lines = "".join(f"sentinel {option}\n" for option in options)
    (tmp_path / "sentinel.conf").write_text(lines)
    sentinel = SentinelServer(tmp_path)
    request.addfinalizer(sentinel.stop)
    nobody = f"sentinel://127.0.0.1:{free_port()}"
    wait_until(lambda: sentinel.knows_replica("shop"), 30, "the Sentinel", every_s=0.1)
    named = {"master_name": "shop"}
    bench = connect(f"{nobody};{sentinel.url}", named, _publish_limit_s=LIMIT_S)
    wait_until(lambda: bench.timer.arm([bench.entry(1)]), 10, "the primary to be found")
    listener = bench.timer.listen(["default"])
    assert bench.timer.arm([bench.entry(2, -1)])
    wait_until(lambda: listener.get_message(timeout=1), 10, "a message")
    assert bench.timer.counts(["default"]) == {"default": (2, 0)}
    primary.stop()
    wait_until(lambda: bench.timer.arm([bench.entry(3)]), 30, "the new primary", every_s=0.1)
    assert of_replica("role") == "master"
    assert bench.timer.is_up


class SentinelServer(Server):
    """A Sentinel, which writes to its configuration file in this test's folder."""

    name = "Sentinel"
    _stops_by = signal.SIGKILL

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"sentinel://127.0.0.1:{self.port}/0"
        command = [redis_program(), folder / "sentinel.conf", "--sentinel", "--port", self.port]
        super().__init__([*map(str, command)], folder / "sentinel.log")

    def _answers(self) -> bool:
        return redis_answers(f"redis://127.0.0.1:{self.port}/0")

    def knows_replica(self, name: str) -> bool:
        with Redis(port=self.port) as client:
            return bool(client.execute_command("SENTINEL", "REPLICAS", name))
