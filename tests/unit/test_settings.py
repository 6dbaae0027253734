"""Settings from arguments, the environment and Celery's configuration."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

import pytest

from delaytasks import ConfigError
from delaytasks.model.text import Secret
from delaytasks.settings import Address, Settings, Sweep, load_settings
from tests.world.recording import delays_on


def test_the_environment_wins_over_celerys_configuration_and_arguments_win_over_both() -> None:
    conf = {"delaytasks_lease": 10, "delaytasks_horizon": "1m", "delaytasks_max_lost_leases": 2}
    conf["broker_url"] = "memory://"
    environ = {"DELAYTASKS_LEASE": "20", "DELAYTASKS_HORIZON": "2m", "PATH": "/bin"}
    settings = load_settings(conf, environ, lease=30.0)
    assert (settings.lease_s, settings.horizon_s, settings.max_lost_leases) == (30, 120, 2)
    origins = {name: origin for name, _, origin, _ in settings.effective()}
    names = ("lease", "horizon", "max_lost_leases", "sweep")
    found = [origins[f"delaytasks_{name}"] for name in names]
    assert found == ["arguments", "environment", "celery configuration", "default"]
    others = ("DELAYTASKS_TEST_REDIS_URL", "DELAYTASKS_BENCH_BROKER_URL", "DELAYTASKS_APP")
    assert load_settings({}, dict.fromkeys(others, "redis://x")) == Settings()


#: Celery's configuration, the environment, arguments, and the error.
TYPOS: list[tuple[dict[str, Any], dict[str, str], dict[str, Any], str]] = [
    ({"delaytasks_leas": 1}, {}, {}, "leas .*celery.*mean delaytasks_lease"),
    ({}, {"DELAYTASKS_HORIZON_S": "1"}, {}, "horizon_s .*mean delaytasks_horizon"),
    ({}, {}, {"databse_url": "x"}, r"databse_url .*mean database_url\?"),
    ({}, {}, {"delaytasks_log_format": "json"}, r"delaytasks_log_format .*mean log_format\?"),
    ({"delaytasks_zzzzzzzz": 1}, {}, {}, "zzzzzzzz"),
]


@pytest.mark.parametrize(("conf", "environ", "given", "says"), TYPOS)
def test_a_typo_gets_the_nearest_name(conf: Any, environ: Any, given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting delaytasks_{says}") as caught:
        load_settings(conf, environ, **given)
    assert ("mean" in str(caught.value)) == ("mean" in says), "a name near to nothing has no guess"


def cases(table: dict[str, list[Any]]) -> list[Any]:
    """Return the name of a setting with each of its values."""
    return [(name, value) for name, values in table.items() for value in values]


#: The values that are given, and what they mean.
VALUES: dict[str, list[tuple[Any, Any]]] = {
    "horizon_s": [("none", None), (None, None), ("1h30m", 5400.0)],
    "purge_after_s": [("86400", 86400.0), (timedelta(days=1), 86400.0)],
    "event_bodies": [("yes", True), ("0", False), (False, False)],
    "pool_size": [("7", 7)],
    "shard": [("0", 0), ("31", 31)],
    "lease_s": [(30, 30.0)],
    "sweep": [("2s", Sweep(2.0, 1)), ("2s 4", Sweep(2.0, 4)), (2, Sweep(2.0, 1))],
    "durable_eta_s": [("true", 0.0), ("1", 0.0), (False, None), ("5m", 300.0), ("1s", 1.0)],
    "tags": [("any", "any"), ("mail.send mail.sent", ("mail.send", "mail.sent")), ([], ())],
    "timer": [("redis://a/0;redis://b/0", Secret("redis://a/0;redis://b/0"))],
    "metrics": [
        (9819, Address("127.0.0.1", 9819)),
        ("0.0.0.0:80", Address("0.0.0.0", 80)),
        ("[::1]:9819", Address("::1", 9819)),
    ],
    "queues": [
        ({"mail.*": "mail"}, {"mail.*": "mail"}),
        ('{"mail.*": "mail", "a,b=c": "slow"}', {"mail.*": "mail", "a,b=c": "slow"}),
    ],
}


@pytest.mark.parametrize(("name", "both"), cases(VALUES))
def test_values_are_read_as_their_type(name: str, both: tuple[Any, Any]) -> None:
    given, value = both
    conf = {f"delaytasks_{name.removesuffix('_s')}": given}
    found = getattr(load_settings(conf, {}), name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        ({"table_prefix": "shop_"}, {"name_prefix": "shop_", "table_schema": ""}),
        ({"table_prefix": "jobs."}, {"name_prefix": "", "table_schema": "jobs"}),
        ({"timer": "redis"}, {"timer_kind": "redis", "redis_url": ""}),
        ({"timer": "redis://a"}, {"timer_kind": "redis", "redis_url": "redis://a"}),
        ({"queues": {"mail.*": "mail"}}, {"default_queue": "default"}),
        ({"queues": {"*": "other"}}, {"default_queue": "other"}),
        ({"sweep": "3s 2"}, {"sweep_s": 3.0, "sweep_partitions": 2, "self_sweep_s": 6.0}),
    ],
)
def test_one_setting_may_mean_several_things(given: Any, derived: Any) -> None:
    settings = load_settings({}, {}, **given)
    assert {name: getattr(settings, name) for name in derived} == derived


def test_settings_of_a_project_that_cannot_be_read_do_no_harm() -> None:
    """In Django's `override_settings`, a name that Celery's configuration lists has no value."""

    class Overridden(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            if name == "_explicit_settings":
                raise KeyError(name)
            return super().__getitem__(name)

    conf = Overridden({"_explicit_settings": 1, "delaytasks_lease": "2m"})
    assert load_settings(conf, {}).lease_s == 120


#: A lease is at least four time budgets of a chunk, and a horizon at least two sweeps; no date is
#: as far away as 1e12 seconds.
WRONG: dict[str, list[Any]] = {
    "pool_size": ["many", 1.5, True, 0, 10**400],
    "lease": ["nan", float("inf"), 10**400, None, -1, True, "soon", 0.15],
    "event_bodies": ["perhaps"],
    "arm": ["never"],
    "namespace": ["a b"],
    "table_prefix": ["x; DROP TABLE", "a.b.c"],
    "max_lost_leases": [5000],
    "horizon": [6, 1e12],
    "sweep": ["5s 0", "5s 4 1", ""],
    "durable_eta": ["sometimes", -1],
    "timer": ["etaa", ["redis://a", None]],
    "_grace_s": ["abc"],
    "metrics": ["port", 70000, 0, "::1:9819", True],
    "tags": [5, ["", "a"]],
    "database_url": [5, ["sqlite://", ""], ["mysql://a/x", "mysql://b/x"]],
    "queues": [
        *({"*": "a b"}, {"mail.*": 5}, {"": "mail"}, {"mail.*": "a b"}),
        *("mail.*=mail", '["mail"]', None),
    ],
    "shard": [-1, 32, "one"],
}


@pytest.mark.parametrize(("name", "given"), cases(WRONG))
def test_a_wrong_value_is_named_with_its_origin(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"delaytasks_{name} = .*celery configuration"):
        load_settings({f"delaytasks_{name}": given}, {})


# -- a database that delaytasks cannot use is refused, and not taken for another one ---------------

UNEQUAL = ["h1:5432,h2:5432/d", "/d?host=h1&host=h2&port=5432", "/d?host=h1,h2,h3&port=1,2"]
UNEQUAL += ["/d?host=h1:x&host=h2", "h1:5432,h2/d"]
#: URLs, and the remedy of the error.
URLS = {f"postgresql://root@{rest}": "delaytasks_database_url" for rest in UNEQUAL}
URLS["oracle://h/d"] = "'oracle'; it supports postgresql, mysql, mariadb, sqlite"
URLS["postgresql://h/d"] = "pip install psycopg2-binary"
URLS["postgresql+psycopg://h/d"] = r"pip install 'delaytasks\[psycopg\]'"
URLS["mysql://h/d"] = r"pip install 'delaytasks\[mysql\]'"


@pytest.mark.parametrize(("url", "remedy"), URLS.items())
def test_an_unusable_database_is_refused_with_a_remedy(
    url: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "@" not in url:
        for name in ("psycopg2", "psycopg", "pymysql"):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=remedy):
        delays_on(url).find()
