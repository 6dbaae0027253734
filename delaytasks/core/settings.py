"""The settings: one frozen object, read and validated once.

They come from Celery's configuration (`delaytasks_*` keys), the environment (`DELAYTASKS_*`) and
the arguments of `DelayTasks(...)`. The environment overrides the configuration, and arguments
override both.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple, NoReturn, TypeVar

from delaytasks.core.body import are_keys, names_of
from delaytasks.core.errors import ConfigError
from delaytasks.core.ids import MAX_SHARDS
from delaytasks.core.inputs import is_queue
from delaytasks.core.text import hide, mask_secret, shown

# -- Rules for the values of single settings ------------------------------------------------------


_IDENTIFIER = re.compile(r"[A-Za-z0-9_]*")


class Rule(NamedTuple):
    #: The end of the error message.
    text: str
    allows: Callable[[Any], bool]


def one_of(*names: str) -> Rule:
    return Rule(f"is {', '.join(map(repr, names[:-1]))} or {names[-1]!r}", lambda v: v in names)


NAME = Rule("has letters, digits, '_', '.' and '-' only", is_queue)
QUEUES = Rule(
    "queues have letters, digits, '_', '.' and '-' only", lambda v: all(map(is_queue, v.values()))
)
IDENTIFIER = Rule("has letters, digits and '_' only", lambda v: bool(_IDENTIFIER.fullmatch(v)))
SLOT_COUNT = Rule("is a power of two, at most 1024", lambda v: v in {1 << n for n in range(11)})
KEYS = Rule(
    "each is a different key, the URL-safe base64 of 32 random bytes; 'plain' may precede them",
    are_keys,
)
NOT_NEGATIVE = Rule("must not be negative", lambda v: v >= 0)
SHARD = Rule(f"is from 0 to {MAX_SHARDS - 1}", lambda v: 0 <= v < MAX_SHARDS)
AT_MOST_1000 = Rule("is at most 1000", lambda v: v <= 1000)
AT_MOST_1000_YEARS = Rule("is at most a thousand years", lambda v: v <= 1000 * 366 * 86400)


# -- Convert the values of settings, which may come as text, to the types of the settings ---------


T = TypeVar("T")
_BOOLS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def convert_setting(name: str, kind: str, value: Any) -> Any:
    """Convert the value of a setting to a type, which is given as the text of its annotation.

    Raises
    ------
    ValueError
        If the value does not have this type and cannot be converted.
    """
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        _checked("None" in kind, value)
        return None
    try:
        return _CONVERTERS[kind.removesuffix(" | None")](name, value)
    except (TypeError, LookupError, OverflowError) as error:
        raise ValueError from error


def _text(name: str, value: Any) -> str:
    if name == "redis_url" and isinstance(value, (list, tuple)):
        return ";".join(value)
    return str(_checked(isinstance(value, str), value))


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(value.split())
    is_list = isinstance(value, (list, tuple))
    return tuple(_checked(is_list and all(isinstance(v, str) and v for v in value), value))


def _names(_: str, value: Any) -> dict[str, str]:
    mapping = json.loads(value) if isinstance(value, str) else value
    is_right = isinstance(mapping, Mapping) and all(
        isinstance(name, str) and name for pair in mapping.items() for name in pair
    )
    return dict(_checked(is_right, mapping))


def _bool(_: str, value: Any) -> bool:
    return _BOOLS[str(value).lower()]


def _int(_: str, value: Any) -> int:
    is_whole = not isinstance(value, bool) and float(value) == int(value)
    return int(_checked(is_whole, value))


def _float(_: str, value: Any) -> float:
    is_number = not isinstance(value, bool) and math.isfinite(float(value))
    return float(_checked(is_number, value))


def _checked(is_right: bool, value: T) -> T:
    if not is_right:
        raise ValueError
    return value


#: The function that converts a value, by the type of its setting.
_CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "str": _text,
    "tuple[str, ...]": _texts,
    "Mapping[str, str]": _names,
    "bool": _bool,
    "int": _int,
    "float": _float,
}


PREFIX = "delaytasks_"
#: Tasks of recurring schedules are made this far ahead if all tasks are sent to the broker.
NO_HORIZON_S = 30.0
#: A worker counts as dead if it was silent for this many sweep intervals.
SILENT_SWEEPS = 3


def _setting(default: Any, about: str, rule: Rule | None = None, secret: bool = False) -> Any:
    given: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    metadata = {"about": about, "rule": rule, "secret": secret}
    return field(repr=not secret, metadata=metadata, **given)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one `DelayTasks`. Durations are in seconds and end in `_s`."""

    database_url: str = _setting(
        "", "SQLAlchemy URL of the database; empty: SQLite in data_dir", secret=True
    )
    shard: int = _setting(
        0, "number that new ids carry; each member of Shards has a number of its own", SHARD
    )
    data_dir: str = _setting(".delaytasks", "folder of the SQLite file and the message files")
    namespace: str = _setting(
        "delaytasks", "prefix of the queues, so that deployments can share a broker", NAME
    )
    table_prefix: str = _setting(
        "", "prefix of the tables, so that deployments can share a database", IDENTIFIER
    )
    table_schema: str = _setting(
        "",
        "schema of the tables (PostgreSQL, MySQL); empty: the connection's default",
        IDENTIFIER,
    )
    pool_size: int = _setting(5, "database connections that each process keeps")

    timer: str = _setting(
        "eta",
        "where rows due within the horizon wait: broker and workers (eta), Redis "
        "(redis), or the table (direct)",
        one_of("eta", "redis", "direct"),
    )
    redis_url: str = _setting(
        "", "Redis of the redis timer; empty: the broker's, if it is Redis", secret=True
    )
    redis_slots: int = _setting(
        8,
        "slots of a queue in the redis timer; must be the same in all processes",
        SLOT_COUNT,
    )
    arm: str = _setting(
        "background",
        "what sends tasks due within the horizon to the broker: a thread (background) or the "
        "call (inline)",
        one_of("inline", "background"),
    )
    horizon_s: float | None = _setting(
        30.0,
        "only tasks due within this time are sent to the broker; none: all tasks",
        AT_MOST_1000_YEARS,
    )
    publish_limit_s: float = _setting(
        0.5, "longest time for sending a message; after it the sweep sends it"
    )
    default_queue: str = _setting("default", "queue of tasks for which no other queue is set", NAME)
    queues: Mapping[str, str] = _setting(
        {},
        "queues of tags, and of patterns such as mail.*; in the environment as JSON",
        QUEUES,
    )
    tags: tuple[str, ...] = _setting(
        (), "tags that this process may schedule in addition to those of its processors"
    )
    durable_eta: bool = _setting(
        False,
        "Celery tasks with an eta or a countdown wait as rows; "
        "overridden by @app.task(durable_eta=…)",
    )
    durable_eta_min_s: float = _setting(
        0.0,
        "Celery tasks with a shorter delay than this are sent to the broker as without delaytasks",
        NOT_NEGATIVE,
    )
    strict_tags: bool | None = _setting(
        None,
        "refuse to schedule tags that are neither in tags nor have a processor in this process; "
        "none: if there are such tags",
    )
    max_delay_s: float = _setting(10 * 366 * 86400.0, "longest delay", AT_MOST_1000_YEARS)
    event_bodies: bool = _setting(
        True, "Flower and other monitors see bodies and results, as they see Celery's"
    )
    log_successes: bool = _setting(False, "log each successful task at INFO (task.done)")
    log_format: str = _setting(
        "text",
        "lines for people (text), or for programs with one line for each change of a task (json, "
        "logfmt)",
        one_of("text", "json", "logfmt"),
    )
    max_body_bytes: int = _setting(256 * 1024, "longest body, as JSON")
    max_error_bytes: int = _setting(64 * 1024, "longest error text that is stored")
    encryption_keys: tuple[str, ...] = _setting(
        (),
        "bodies and results are encrypted with the first key and decrypted with all; "
        "'plain' as the first: new ones are not encrypted",
        KEYS,
        secret=True,
    )

    chunk_time_budget_s: float = _setting(
        0.05, "time budget of a chunk; rows that have not started by then are given back"
    )
    chunk_max: int = _setting(200, "most rows in one chunk", AT_MOST_1000)
    grace_s: float = _setting(
        1.0, "a task that is later than this is found through the table, where all workers help"
    )
    lease_s: float = _setting(
        60.0, "time for which a running task belongs to its worker; renewed after a third of it"
    )
    max_lost_leases: int = _setting(
        5, "a task that loses its worker this many times in a row is FAILED", AT_MOST_1000
    )

    sweep_s: float = _setting(5.0, "time between sweeps")
    self_sweep_s: float = _setting(
        10.0,
        "time without a sweep after which a worker sweeps by itself, within a second; each worker "
        "drains its own queues as often",
    )
    sweep_partitions: int = _setting(
        1, "number of sweep partitions, each with its own share of the table"
    )
    drain_messages: int = _setting(
        2, "drain messages per worker and queue at each sweep, and per queue that a worker leaves"
    )
    purge_after_s: float | None = _setting(
        None, "finished tasks older than this are deleted; none: never"
    )
    statistics: bool = _setting(
        True, "workers count what they run, and write the counts to the database once a minute"
    )
    statistics_tags: int = _setting(
        200, "most tags that a worker counts by name; the others are counted together"
    )

    metrics_port: int | None = _setting(
        None, "port at which a worker serves its metrics to Prometheus; none: it does not"
    )
    metrics_host: str = _setting("127.0.0.1", "address at which a worker serves its metrics")
    metrics_file: str = _setting(
        "",
        "file into which a worker writes its metrics; %h, %n and %d stand for its name, as in "
        "Celery; empty: none",
    )

    callback_secrets: tuple[str, ...] = _setting(
        (), "keys that sign HTTP callbacks (whsec_…)", secret=True
    )
    callback_allow: tuple[str, ...] = _setting(
        (), "hosts and networks that callbacks may reach in addition to public https"
    )
    callback_ca_file: str = _setting(
        "", "CA certificates that callbacks trust, as PEM; empty: the public ones"
    )
    callback_broker_url: str = _setting(
        "", "broker of queue callbacks; empty: the app's own broker", secret=True
    )
    callback_connect_s: float = _setting(5.0, "longest time for each step of sending a callback")
    callback_read_s: float = _setting(10.0, "longest silence of a callback's receiver")
    callback_total_s: float = _setting(30.0, "longest time for a whole callback")
    callback_in_flight: int = _setting(
        100, "callbacks that each process sends simultaneously", AT_MOST_1000
    )

    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, spec in _SPECS.items():
            value, rule = getattr(self, name), spec.metadata["rule"]
            if type(value) in (int, float) and value <= 0 and rule not in _RULES_WITH_ZERO:
                self._refuse(name, "must be above 0")
            if value is not None and rule is not None and not rule.allows(value):
                self._refuse(name, rule.text)
        for name, is_kept, text in _RULES_FOR_PAIRS:
            if getattr(self, name) is not None and not is_kept(self):
                self._refuse(name, text)

    def _refuse(self, name: str, rule: str) -> NoReturn:
        value = "***" if _SPECS[name].metadata["secret"] else repr(getattr(self, name))
        raise ConfigError(f"{PREFIX}{name} = {value} (from {self.origin(name)}): {rule}")

    @property
    def uses_broker(self) -> bool:
        """Whether messages reach the workers; if not, they read everything from the table."""
        return self.timer != "direct"

    @property
    def has_structured_log(self) -> bool:
        return self.log_format != "text"

    @property
    def silent_s(self) -> float:
        """A worker that was silent for this time counts as dead."""
        return SILENT_SWEEPS * self.sweep_s

    @property
    def recurring_lead_s(self) -> float:
        """How long before an occurrence of a recurring schedule its task is made.

        The task must be in the table before a sweep arms the rows of that time, also if beat is
        silent and a sweep is late.
        """
        horizon_s = NO_HORIZON_S if self.horizon_s is None else self.horizon_s
        return horizon_s + self.self_sweep_s + self.sweep_s

    def has_sweep_partition(self, number: object) -> bool:
        """Return whether the number of a message or of beat's schedule is a sweep partition."""
        return type(number) is int and 0 <= number < self.sweep_partitions

    def origin(self, name: str) -> str:
        return self.origins.get(name, "default")

    def effective(self) -> list[tuple[str, str, str, str]]:
        """Return the name, value, origin and meaning of each setting, with secrets masked."""
        return [
            (
                PREFIX + name,
                _shown(spec, getattr(self, name)),
                self.origin(name),
                str(spec.metadata["about"]),
            )
            for name, spec in _SPECS.items()
        ]


def _shown(spec: Field[Any], value: Any) -> str:
    if spec.name == "encryption_keys":
        return " ".join(names_of(value))
    if isinstance(value, tuple):
        return " ".join(map(mask_secret, value) if spec.metadata["secret"] else value)
    if spec.metadata["secret"]:
        return mask_secret(value)
    if value is None:
        return "none"
    return json.dumps(value) if isinstance(value, Mapping) else str(value)


_SPECS = {spec.name: spec for spec in fields(Settings) if spec.metadata}


def hide_secrets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with secrets whose `repr` is masked."""
    return {
        name: hide(value) if name in secret_names() else value for name, value in arguments.items()
    }


def secret_names() -> list[str]:
    """Return the names of the settings that contain passwords or keys."""
    return [name for name, spec in _SPECS.items() if spec.metadata["secret"]]


_RULES_WITH_ZERO = (NOT_NEGATIVE, SHARD)
_RULES_FOR_PAIRS: list[tuple[str, Callable[[Any], bool], str]] = [
    (
        "lease_s",
        lambda s: s.lease_s >= 4 * s.chunk_time_budget_s,  # rows claimed ahead wait for two
        "must be at least four times chunk_time_budget_s",
    ),
    ("self_sweep_s", lambda s: s.self_sweep_s >= s.sweep_s, "must not be below sweep_s"),
    (
        "horizon_s",
        lambda s: s.horizon_s >= 2 * s.sweep_s,
        "must be at least twice sweep_s, or rows fall between",
    ),
]


def load_settings(
    conf: Mapping[str, Any], environ: Mapping[str, str], **arguments: Any
) -> Settings:
    """Read the settings from Celery's configuration, the environment and arguments.

    Raises
    ------
    ConfigError
        If a setting is unknown, has the wrong type, or violates a rule.
    """
    sources = {
        "celery configuration": {k: v for k, v in conf.items() if k.startswith(PREFIX)},
        "environment": {
            k.lower(): v
            for k, v in environ.items()
            if k.startswith(PREFIX.upper()) and not _is_for_tools(k)
        },
        "arguments": {PREFIX + name: value for name, value in arguments.items()},
    }
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, given in sources.items():
        for full_name, value in given.items():
            name = full_name.removeprefix(PREFIX)
            values[name], origins[name] = _read(name, value, origin), origin
    return Settings(**values, origins=origins)


def _read(name: str, value: Any, origin: str) -> Any:
    if name not in _SPECS:
        close = difflib.get_close_matches(name, _SPECS, n=1, cutoff=0.5)
        hint = f"; did you mean {PREFIX}{close[0]}?" if close else ""
        raise ConfigError(f"unknown setting {PREFIX}{name} (from {origin}){hint}")
    kind, is_secret = str(_SPECS[name].type), _SPECS[name].metadata["secret"]
    try:
        converted = convert_setting(name, kind, value)
    except ValueError:
        text = "***" if is_secret else shown(value)
        fact = f"{PREFIX}{name} = {text} (from {origin}) is not of type {kind}"
        raise ConfigError(fact) from None
    return hide(converted) if is_secret else converted


def _is_for_tools(variable: str) -> bool:
    """Return whether a variable belongs to the tests, the benchmarks or the command line."""
    others = ("DELAYTASKS_CONSOLE_", "DELAYTASKS_TEST_", "DELAYTASKS_BENCH_")
    return variable.startswith(others) or variable == "DELAYTASKS_APP"
