"""The location of the timer's Redis: a server, a cluster, or a primary that Sentinels know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import redis
from redis import ConnectionPool, RedisError
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.exceptions import RedisClusterException
from redis.retry import Retry
from redis.sentinel import Sentinel

from delaytasks.core.errors import ConfigError
from delaytasks.core.text import Secret, mask_secret

FAILURES = (RedisError, RedisClusterException, OSError)
#: The number of further nodes of a cluster on which a command is tried.
CLUSTER_RETRIES = 2
SENTINEL = "sentinel://"
_SCHEMES = ("redis://", "rediss://", "unix://")
_SENTINEL_PORT = 26379


class RedisLocation(NamedTuple):
    """One or more URLs. Several URLs are nodes of one cluster, or with a `primary`, Sentinels."""

    urls: tuple[str, ...]
    #: The name of the primary at the Sentinels.
    primary: str = ""
    #: Options of the connections to Sentinels, such as a password.
    sentinel_options: Mapping[str, Any] = {}

    def connect(self, options: Mapping[str, Any], known: Iterable[ClusterNode] = ()) -> Any:
        """Return a client. `known` are the nodes that a cluster had before."""
        if self.primary:
            return self._ask_sentinels(options)
        if seeds := [ClusterNode(node.host, node.port) for node in known]:
            return _cluster(self.urls[0], seeds, options)
        failure: BaseException | None = None
        for url in self.urls:
            client = redis.Redis.from_url(url, **options)
            try:
                if client.info("cluster").get("cluster_enabled"):
                    others = [parse_url(other) for other in self.urls if other != url]
                    seeds = [
                        ClusterNode(other.get("host", "localhost"), other.get("port", 6379))
                        for other in others
                    ]
                    return _cluster(url, seeds, options)
            except FAILURES as error:
                failure = failure or error
            else:
                if url == self.urls[0]:
                    return client
                # All processes must use the same server. A server that is not a node of a cluster
                # is used only if its URL is the first one.
            client.close()
        raise failure or redis.ConnectionError("the first Redis does not answer")

    def _ask_sentinels(self, options: Mapping[str, Any]) -> Any:
        read = [
            parse_url(url.partition("?")[0].replace(SENTINEL, "redis://", 1)) for url in self.urls
        ]
        nodes = [(one.get("host", "localhost"), one.get("port", _SENTINEL_PORT)) for one in read]
        # As in Celery, the user, the password and the number of the database apply to the server.
        own = {
            name: value
            for one in reversed(read)
            for name, value in one.items()
            if name not in ("host", "port")
        }
        sentinels = Sentinel(
            nodes, sentinel_kwargs={**options, **self.sentinel_options}, **{**own, **options}
        )
        return sentinels.master_for(self.primary)


def _cluster(url: str, seeds: list[ClusterNode], options: Mapping[str, Any]) -> RedisCluster:
    """Return a client that tries other nodes if the first one is down."""
    return RedisCluster(
        url=url, startup_nodes=seeds, **{**options, "retry": Retry(NoBackoff(), CLUSTER_RETRIES)}
    )


def broker_urls(broker_url: Any) -> list[str]:
    """The URLs of `broker_url`, which is a list, or a text with semicolons between URLs."""
    if isinstance(broker_url, (list, tuple)):
        return [url for each in broker_url for url in broker_urls(each)]
    return [url.strip() for url in str(broker_url or "").split(";") if url.strip()]


def redis_location(
    given: str, broker_url: Any, transport_options: Mapping[str, Any] | None = None
) -> RedisLocation:
    """Return the location in `delaytasks_redis_url`, or else in the broker's URL.

    Raises `ConfigError` if it is not a Redis.
    """
    where = "delaytasks_redis_url" if given else "the broker's URL"
    urls = tuple(_readable(url) for url in broker_urls(given or broker_url))
    is_sentinel = bool(urls) and all(url.startswith(SENTINEL) for url in urls)
    if not urls or not (is_sentinel or all(url.startswith(_SCHEMES) for url in urls)):
        found = ";".join(map(mask_secret, urls)) or "empty"
        raise ConfigError(
            f"delaytasks_timer = 'redis' needs a Redis, and {where} is {found}: set "
            "delaytasks_redis_url to redis://…, rediss://…, unix://… or sentinel://…, with ';' "
            "between several URLs"
        )
    for url in urls:
        try:
            # This reads the URL without connecting.
            pool = ConnectionPool.from_url(
                url.partition("?")[0].replace(SENTINEL, "redis://") if is_sentinel else url
            )
            pool.make_connection()
        except (ValueError, TypeError, RedisError):  # their messages may quote a password
            raise ConfigError(
                f"delaytasks_timer = 'redis' cannot read {where}: the form is "
                "redis://user:password@host:6379/0, with the password's special characters written "
                "as %…, and with options of redis-py"
            ) from None
    if not is_sentinel:
        return RedisLocation(urls)
    options = transport_options or {}
    named = [
        name for url in urls for name in parse_qs(url.partition("?")[2]).get("master_name", ())
    ]
    primary = str((named or [options.get("master_name") or ""])[0])
    if not primary:
        raise ConfigError(
            f"delaytasks_timer = 'redis' needs the name of the primary at the Sentinels of "
            f"{where}: add ?master_name=… to the URL, or master_name to broker_transport_options"
        )
    return RedisLocation(urls, primary, options.get("sentinel_kwargs") or {})


def _readable(url: str) -> str:
    """Return a URL in the form of redis-py, which differs from kombu's for sockets and TLS."""
    if url.startswith("redis+socket://"):
        url = url.replace("redis+socket://", "unix://").replace("virtual_host=", "db=")
    return Secret(re.sub(r"(?<=ssl_cert_reqs=)CERT_(\w+)", lambda found: found[1].lower(), url))
