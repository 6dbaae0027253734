"""Settings from arguments, the environment and Celery's configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from delaytasks.core.errors import ConfigError
from delaytasks.core.settings import Settings, load_settings


def test_without_settings_the_defaults_hold() -> None:
    settings = load_settings({}, {})
    assert settings == Settings()
    assert settings.origin("lease_s") == "default"


def test_the_environment_wins_over_celerys_configuration_and_arguments_win_over_both() -> None:
    conf = {
        "delaytasks_lease_s": 10,
        "delaytasks_sweep_s": 6,
        "delaytasks_sweep_partitions": 2,
        "broker_url": "memory://",
    }
    environ = {"DELAYTASKS_LEASE_S": "20", "DELAYTASKS_SWEEP_S": "7", "PATH": "/bin"}
    settings = load_settings(conf, environ, lease_s=30.0)
    assert (settings.lease_s, settings.sweep_s, settings.sweep_partitions) == (30.0, 7.0, 2)
    origins = [
        settings.origin(name) for name in ("lease_s", "sweep_s", "sweep_partitions", "grace_s")
    ]
    assert origins == ["arguments", "environment", "celery configuration", "default"]


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            lambda: load_settings({"delaytasks_leas_s": 1}, {}),
            "delaytasks_leas_s .*celery.*mean delaytasks_lease_s",
        ),
        (
            lambda: load_settings({}, {"DELAYTASKS_HORIZON": "1"}),
            "delaytasks_horizon .*mean delaytasks_horizon_s",
        ),
        (
            lambda: load_settings({}, {}, databse_url="x"),
            "delaytasks_databse_url .*mean delaytasks_database_url",
        ),
    ],
)
def test_a_typo_is_answered_with_the_nearest_name(
    load: Callable[[], Settings], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load()


def test_a_name_near_to_nothing_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError, match="unknown setting delaytasks_zzzzzzzz") as caught:
        load_settings({"delaytasks_zzzzzzzz": 1}, {})
    assert "mean" not in str(caught.value)


def test_variables_of_the_tests_are_no_settings() -> None:
    for name in ("DELAYTASKS_TEST_REDIS_URL", "DELAYTASKS_BENCH_BROKER_URL", "DELAYTASKS_APP"):
        assert load_settings({}, {name: "redis://x"}) == Settings()


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("horizon_s", "none", None),
        ("horizon_s", None, None),
        ("purge_after_s", "86400", 86400.0),
        ("strict_tags", "yes", True),
        ("strict_tags", "0", False),
        ("strict_tags", False, False),
        ("pool_size", "7", 7),
        ("shard", "0", 0),
        ("shard", "31", 31),
        ("lease_s", 30, 30.0),
        ("queues", {"mail.*": "mail"}, {"mail.*": "mail"}),
        ("queues", '{"mail.*": "mail", "a,b=c": "slow"}', {"mail.*": "mail", "a,b=c": "slow"}),
    ],
)
def test_values_are_read_as_their_type(name: str, given: Any, value: Any) -> None:
    found = getattr(load_settings({PREFIXED + name: given}, {}), name)
    assert (found, type(found)) == (value, type(value))


PREFIXED = "delaytasks_"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("pool_size", "many"),
        ("pool_size", 1.5),
        ("pool_size", True),
        ("pool_size", 0),
        ("lease_s", "nan"),
        ("lease_s", float("inf")),
        ("lease_s", 10**400),
        ("pool_size", 10**400),
        ("lease_s", None),
        ("lease_s", -1),
        ("lease_s", 0.15),  # shorter than four time budgets of a chunk
        ("strict_tags", "perhaps"),
        ("arm", "never"),
        ("namespace", "a b"),
        ("table_prefix", "x; DROP TABLE"),
        ("table_schema", "a.b"),
        ("chunk_max", 5000),
        ("self_sweep_s", 1),  # below sweep_s
        ("horizon_s", 6),  # below two sweeps
        ("database_url", 5),
        ("default_queue", "a b"),
        ("queues", "mail.*=mail"),
        ("queues", '["mail"]'),
        ("queues", {"mail.*": 5}),
        ("queues", {"": "mail"}),
        ("queues", {"mail.*": "a b"}),
        ("queues", None),
        ("database_url", ["sqlite://", ""]),
        ("horizon_s", 1e12),  # no date is that far away
        ("database_url", ["mysql://a/x", "mysql://b/x"]),
        ("shard", -1),
        ("shard", 32),
        ("shard", "one"),
    ],
)
def test_a_wrong_value_is_named_with_its_origin(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"delaytasks_{name} = .*celery configuration"):
        load_settings({PREFIXED + name: given}, {})


def test_the_effective_settings_show_their_origin_and_no_secret() -> None:
    settings = load_settings(
        {}, {"DELAYTASKS_DATABASE_URL": "mysql://me:canary@host/x"}, purge_after_s=None
    )
    rows = {name: (value, origin) for name, value, origin, _about in settings.effective()}
    assert rows["delaytasks_database_url"] == ("mysql://me:***@host/x", "environment")
    assert rows["delaytasks_purge_after_s"] == ("none", "arguments")
    assert "canary" not in repr(rows)
    assert all(about for *_, about in settings.effective())
