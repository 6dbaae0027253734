"""The settings: one frozen object, read and validated once.

They come from Celery's configuration (`delaytasks_*` keys), the environment (`DELAYTASKS_*`) and
the arguments of `DelayTasks(...)`. The environment overrides the configuration, and arguments
override both. A duration is a number of seconds, a timedelta, or a text such as "30s" or "1h30m".
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from delaytasks.model.body import checked_keys, names_of
from delaytasks.model.clock import MAX_SHARDS
from delaytasks.model.errors import ConfigError
from delaytasks.model.inputs import MAX_DELAY_S, check_wait
from delaytasks.model.text import hide, mask_secret, shown

PREFIX = "delaytasks_"
#: Tasks of recurring schedules are made this far ahead if all tasks are sent to the broker.
NO_HORIZON_S = 30.0
#: A worker counts as dead if it was silent for this many sweep intervals.
SILENT_SWEEPS = 3
#: Its running rows are not recovered before this time, however often sweeps come: a busy machine
#: may silence a live worker for some seconds, and its tasks would run twice.
LEAST_LOST_S = 15.0

# -- Readers: convert a value, which may be text, or raise a ValueError with the rule -------------

Reader = Callable[[Any], Any]
_BOOLS = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}
_TIMERS = ("eta", "direct", "redis")
_ADDRESS = re.compile(r"(?:(?:\[([^]/]+)]|([^][:/]+)):)?([0-9]{1,5})")


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    @classmethod
    def read(cls, text: str) -> Address | None:
        """Read `[HOST:]PORT`, or return None. An IPv6 address is in brackets, as in a URL."""
        found = _ADDRESS.fullmatch(text)
        if found is None or int(found[3]) > 65535:
            return None
        return cls(found[1] or found[2] or "127.0.0.1", int(found[3]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Sweep(NamedTuple):
    interval_s: float
    partitions: int = 1


#: What the console may paint the name of a deployment with.
COLORS = ("red", "orange", "green", "blue", "grey")


class Badge(NamedTuple):
    """The name of a deployment on the pages of the console, and its colour."""

    name: str
    color: str


def _by(rule: str, convert: Reader) -> Reader:
    """Return a reader whose errors state the rule, whatever `convert` raises."""

    def read(value: Any) -> Any:
        try:
            return convert(value)
        except (ValueError, TypeError, LookupError, AttributeError):
            raise ValueError(rule) from None

    return read


def _matching(pattern: str, rule: str) -> Reader:
    found = re.compile(pattern, re.ASCII).fullmatch
    return _by(rule, lambda value: found(value)[0])  # type: ignore[index]  # None is a TypeError


def _one_of(*names: str) -> Reader:
    rule = f"is {', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
    return _matching("|".join(names), rule)


def _whole(least: int, most: int = 2**31) -> Reader:
    def convert(value: Any) -> int:
        number = int(str(value))
        if not least <= number <= most:
            raise ValueError
        return number

    end = f" to {most}" if most < 2**31 else ""
    return _by(f"is a whole number from {least}{end}", convert)


def _or_none(read: Reader) -> Reader:
    return lambda value: None if _is_none(value) else read(value)


def _is_none(value: Any) -> bool:
    return str(value).lower() == "none"


def _each_text(value: Any) -> tuple[str, ...]:
    return tuple(map(_WORD, value.split() if isinstance(value, str) else value))


def _queues(value: Any) -> dict[str, str]:
    mapping = json.loads(value) if isinstance(value, str) else value
    return {_WORD(tag): _NAME(queue) for tag, queue in mapping.items()}


def _durable_eta(value: Any) -> float | None:
    word = str(value).lower()
    if word in _BOOLS:
        return 0.0 if _BOOLS[word] else None
    seconds: float = _DURATION(value)
    return seconds


def _sweep(value: Any) -> Sweep:
    interval, *partitions = value.split() if isinstance(value, str) else [value]
    return Sweep(_DURATION(interval), *map(_whole(1), partitions))


def _metrics(value: Any) -> Address | None:
    text = "" if _is_none(value) else str(value)
    address = Address.read(text)
    if text and (address is None or not address.port):
        raise ValueError
    return address


def _badge(value: Any) -> Badge:
    text: str = _TEXT(value)
    name, _, color = text.rpartition(" ")
    if color not in COLORS or not name:
        name, color = text, "red" if text.lower().startswith("prod") else "blue"
    if not name.isprintable() or len(name) > 24:
        raise ValueError
    return Badge(name, color if name else "")


_BOOL = _by("is true or false", lambda value: _BOOLS[str(value).lower()])
_TEXT, _WORD = (_matching(pattern, "is a text") for pattern in ("(?s).*", "(?s).+"))
_NAME = _matching("[A-Za-z0-9_.-]+", "has letters, digits, '_', '.' and '-' only")
_TEXTS = _by("is a list of texts, or a text with blanks between", _each_text)
_DURATION = _by(
    "is a duration, as 30s, 5m or 1h30m",
    partial(check_wait, argument="value", most_s=MAX_DELAY_S, may_be_zero=False),
)


# -- The settings ---------------------------------------------------------------------------------


def _setting(
    default: Any, read: Reader, about: str, mask: Callable[[str], str] | None = None
) -> Any:
    """Return the field of a setting. `mask` returns a secret text as it is shown."""
    metadata = {"default": default, "read": read, "about": about, "mask": mask}
    return field(default_factory=lambda: read(default), repr=mask is None, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one `DelayTasks`, and constants. Durations are in seconds: `lease_s`."""

    database_url: str = _setting(
        "", _TEXT, "SQLAlchemy URL of the database; empty: SQLite in data_dir", mask_secret
    )
    shard: int = _setting(
        0,
        _whole(0, MAX_SHARDS - 1),
        "number that new ids carry; each member of Shards has a number of its own",
    )
    data_dir: str = _setting(
        ".delaytasks", _TEXT, "folder of the SQLite file and the message files"
    )
    namespace: str = _setting(
        "delaytasks", _NAME, "prefix of the queues, so that deployments can share a broker"
    )
    table_prefix: str = _setting(
        "",
        _matching(
            r"(?:\w+\.)?\w*",
            "has letters, digits and '_' only, and may begin with a schema and a dot",
        ),
        "prefix of the tables, so that deployments can share a database; may begin with a schema "
        "(PostgreSQL, MySQL) and a dot, as jobs.shop_",
    )
    pool_size: int = _setting(5, _whole(1), "database connections that each process keeps")

    timer: str = _setting(
        "eta",
        _matching("eta|direct|redis|.*://.*", "is 'eta', 'direct', 'redis', or the URL of a Redis"),
        "where rows due within the horizon wait: broker and workers (eta), the table (direct), "
        "the broker's Redis (redis), or another Redis (its URL)",
        lambda value: value if difflib.get_close_matches(value, _TIMERS) else mask_secret(value),
    )
    arm: str = _setting(
        "background",
        _one_of("inline", "background"),
        "what sends tasks due within the horizon to the broker: a thread (background) or the "
        "call (inline)",
    )
    horizon_s: float | None = _setting(
        "30s",
        _or_none(_DURATION),
        "only tasks due within this time are sent to the broker; none: all tasks",
    )
    queues: Mapping[str, str] = _setting(
        {"*": "default"},
        _by(
            'maps tags and patterns to queues, as {"mail.*": "mail", "*": "other"}, which in the '
            "environment is JSON; a queue has letters, digits, '_', '.' and '-' only",
            _queues,
        ),
        "queues of tags, and of patterns such as mail.*; in the environment as JSON",
    )
    tags: str | tuple[str, ...] = _setting(
        "auto",
        lambda value: value if value in ("auto", "any") else _TEXTS(value),
        "tags that this process may schedule: those of its processors and of a list; any; or all "
        "if it has no processors (auto)",
    )
    #: The shortest delay of Celery tasks that wait as rows; None: only those that ask for it.
    durable_eta_s: float | None = _setting(
        False,
        _by("is true, false or the shortest delay, as 5m", _durable_eta),
        "Celery tasks with an eta or a countdown wait as rows, all or from this delay on; "
        "overridden by @app.task(durable_eta=…)",
    )
    event_bodies: bool = _setting(
        True, _BOOL, "Flower and other monitors see bodies and results, as they see Celery's"
    )
    log_format: str = _setting(
        "text",
        _one_of("text", "json"),
        "lines for people (text), or for programs with one line for each change of a task (json)",
    )
    max_body_bytes: int = _setting(256 * 1024, _whole(1), "longest body, as JSON")
    encryption_keys: tuple[str, ...] = _setting(
        (),
        _by(
            "each is a different key, the URL-safe base64 of 32 random bytes; 'plain' may precede "
            "them",
            lambda value: checked_keys(_TEXTS(value)),
        ),
        "bodies and results are encrypted with the first key and decrypted with all; "
        "'plain' as the first: new ones are not encrypted",
        mask_secret,
    )

    lease_s: float = _setting(
        "1m",
        _DURATION,
        "time for which a running task belongs to its worker; renewed after a third of it",
    )
    max_lost_leases: int = _setting(
        5, _whole(1, 1000), "a task that loses its worker this many times in a row is FAILED"
    )
    sweep: Sweep = _setting(
        "5s",
        _by("is the interval, as 5s, or the interval and the partitions, as '5s 4'", _sweep),
        "time between sweeps; with the number of sweep partitions, each with its own share of the "
        "table, as '5s 4'",
    )
    purge_after_s: float | None = _setting(
        "30d",
        _or_none(_DURATION),
        "tasks that ended (DONE, FAILED, CANCELLED) longer ago than this are deleted; none: never",
    )
    statistics: bool = _setting(
        True,
        _BOOL,
        "workers count what they run, and write the counts to the database once a minute",
    )
    metrics: Address | None = _setting(
        "",
        _by("is a port, as 9819, or an address, as 0.0.0.0:9819 or [::]:9819", _metrics),
        "where a worker shows its metrics to Prometheus: at a port (9819, only for this host) or "
        "an address (0.0.0.0:9819); empty: nowhere",
    )

    environment: Badge = _setting(
        "",
        _by(f"is a name of at most 24 characters, and maybe a colour: {', '.join(COLORS)}", _badge),
        "name of this deployment on all pages of the console, as production, or 'staging orange'; "
        "without a colour (red, orange, green, blue, grey), production is red, and others are blue",
    )

    callback_secrets: tuple[str, ...] = _setting(
        (), _TEXTS, "keys that sign HTTP callbacks (whsec_…)", mask_secret
    )
    callback_allow: tuple[str, ...] = _setting(
        (), _TEXTS, "hosts and networks that callbacks may reach in addition to public https"
    )
    callback_broker_url: str = _setting(
        "", _TEXT, "broker of queue callbacks; empty: the app's own broker", mask_secret
    )
    callback_timeout_s: float = _setting("30s", _DURATION, "longest time for a whole callback")

    # -- Constants. Only tests change them: `DelayTasks(…, _grace_s=0)`, `delaytasks__grace_s` ----

    #: Slots of a queue in the Redis timer: a power of two, the same in all processes.
    redis_slots: int = 8
    #: The longest time for sending a message. A row without one is found when it is overdue.
    publish_limit_s: float = 0.5
    max_error_bytes: int = 64 * 1024
    #: The time budget of a chunk. Rows that have not started by then are given back.
    chunk_time_budget_s: float = 0.05
    chunk_max: int = 200
    #: A task that is later than this is found through the table, where all workers help.
    grace_s: float = 1.0
    #: After this time without a sweep a worker sweeps by itself, within a second. 0 means twice the
    #: interval of sweep. Each worker looks for overdue rows of its own queues more often: once in
    #: an interval of sweep.
    self_sweep_s: float = 0.0
    #: The messages of one request to drain a queue. Each makes one worker start a drain. Sweeps
    #: send requests for the rows that they make ready, and workers for the queues that they leave.
    drain_messages: int = 2
    #: The most tags that a worker counts by name; the others are counted together.
    statistics_tags: int = 200
    #: The longest time for each step of sending a callback.
    callback_connect_s: float = 5.0
    #: The longest silence of a callback's receiver.
    callback_read_s: float = 10.0

    #: The values that were given, and their origins.
    given: Mapping[str, tuple[Any, str]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "self_sweep_s", self.self_sweep_s or 2 * self.sweep_s)

    @property
    def table_schema(self) -> str:
        return self.table_prefix.rpartition(".")[0]

    @property
    def name_prefix(self) -> str:
        """The prefix of the tables without the schema."""
        return self.table_prefix.rpartition(".")[2]

    @property
    def redis_url(self) -> str:
        """The URL of the Redis timer; empty: the broker's."""
        return self.timer if "://" in self.timer else ""

    @property
    def default_queue(self) -> str:
        return self.queues.get("*", "default")

    @property
    def sweep_s(self) -> float:
        return self.sweep.interval_s

    @property
    def sweep_partitions(self) -> int:
        return self.sweep.partitions

    @property
    def timer_kind(self) -> str:
        """The kind of the timer: eta, direct or redis."""
        return "redis" if self.redis_url else str(self.timer)

    @property
    def uses_broker(self) -> bool:
        """Whether messages reach the workers; if not, they read everything from the table."""
        return self.timer != "direct"

    @property
    def silent_s(self) -> float:
        """A worker that was silent for this time counts as dead."""
        return SILENT_SWEEPS * self.sweep_s

    @property
    def lost_s(self) -> float:
        """The running rows of a worker that was silent for this time are recovered."""
        return max(self.silent_s, LEAST_LOST_S)

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

    def effective(self) -> list[tuple[str, str, str, str]]:
        """Return the name, value as written, origin and meaning of each setting.

        Secrets are masked.
        """
        rows = []
        for name, spec in _SPECS.items():
            value, origin = self.given.get(name, (spec.metadata["default"], "default"))
            rows.append((PREFIX + name, _shown(spec, value), origin, spec.metadata["about"]))
        return rows


#: The fields of the settings and of the constants, by the names that people write.
_SPECS = {spec.name.removesuffix("_s"): spec for spec in fields(Settings) if spec.metadata}
_CONSTANTS = {
    "_" + spec.name: spec for spec in fields(Settings) if isinstance(spec.default, (int, float))
}


def _shown(spec: Field[Any], value: Any) -> str:
    show = spec.metadata["mask"] or str
    if spec.name == "encryption_keys":
        value, show = names_of(spec.metadata["read"](value)), str
    if isinstance(value, (list, tuple)):
        return " ".join(map(show, value))
    if isinstance(value, Mapping):
        return json.dumps(value)
    return "none" if value is None else str(show(value))


# -- The data folder, which only its owner can read -----------------------------------------------


#: The folder of the message files, in the data folder.
MESSAGE_FOLDER = "broker"


def make_folder(folder: Path) -> None:
    """Make a folder and its parents unless they exist."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def make_file(path: Path) -> None:
    """Make an empty file unless it exists. Other users never have access, not even briefly."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))


def write_file(path: Path, text: str) -> None:
    """Write a new file."""
    make_file(path)
    path.write_text(text, encoding="utf-8")


# -- Read the settings ----------------------------------------------------------------------------


def hide_secrets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with secrets whose `repr` is masked."""
    return {
        name: hide(value) if name in secret_names() else value for name, value in arguments.items()
    }


def secret_names() -> list[str]:
    """Return the names of the settings that contain passwords or keys."""
    return [name for name, spec in _SPECS.items() if spec.metadata["mask"]]


# -- Read the settings of a `DelayTasks` ----------------------------------------------------------


def load_settings(
    conf: Mapping[str, Any], environ: Mapping[str, str], **arguments: Any
) -> Settings:
    """Read the settings from Celery's configuration, the environment and arguments.

    Raises
    ------
    ConfigError
        If a setting is unknown, has the wrong type, or violates a rule.
    """
    # Only these values are read: some of a Django project's settings cannot be.
    own = {key: conf[key] for key in conf if key.startswith(PREFIX)}
    variables = {
        name.lower(): value
        for name, value in environ.items()
        if name.startswith(PREFIX.upper()) and not _is_for_tools(name)
    }
    given: dict[str, tuple[Any, str]] = {}
    for origin, found in (
        ("celery configuration", own),
        ("environment", variables),
        ("arguments", {PREFIX + name: value for name, value in arguments.items()}),
    ):
        for full_name, value in found.items():
            name = full_name.removeprefix(PREFIX)
            if name not in _SPECS and name not in _CONSTANTS:
                raise ConfigError(_unknown(name, origin))
            given[name] = hide(value) if name in secret_names() else value, origin
    values: dict[str, Any] = {}
    for name, (value, _) in given.items():
        spec = _SPECS.get(name) or _CONSTANTS[name]
        try:
            read = spec.metadata.get("read", type(spec.default))(value)
        except ValueError as error:
            raise _wrong(name, value, given, str(error)) from None
        values[spec.name] = hide(read) if spec.metadata.get("mask") else read
    made = Settings(**values, given=given)
    budgets_s = 4 * made.chunk_time_budget_s  # rows claimed ahead wait for two budgets
    if made.lease_s < budgets_s:
        raise _wrong("lease", made.lease_s, given, f"is at least {budgets_s:g} s")
    if made.horizon_s is not None and made.horizon_s < 2 * made.sweep_s:
        rule = "is at least twice the interval of sweep, or rows fall between"
        raise _wrong("horizon", made.horizon_s, given, rule)
    return made


def _wrong(name: str, value: Any, given: Mapping[str, Any], rule: str) -> ConfigError:
    mask = name in _SPECS and _SPECS[name].metadata["mask"]
    text = mask(value) if mask and isinstance(value, str) else "***" if mask else shown(value)
    origin = given[name][1] if name in given else "default"
    return ConfigError(f"{PREFIX}{name} = {text} (from {origin}): the value {rule}")


def _unknown(name: str, origin: str) -> str:
    close = difflib.get_close_matches(name, _SPECS, n=1, cutoff=0.5)
    prefix = "" if origin == "arguments" else PREFIX
    hint = f"; did you mean {prefix}{close[0]}?" if close else ""
    return f"unknown setting {PREFIX}{name} (from {origin}){hint}"


def _is_for_tools(variable: str) -> bool:
    """Return whether a variable belongs to the tests, the benchmarks or the command line."""
    others = ("DELAYTASKS_TEST_", "DELAYTASKS_BENCH_")
    return variable.startswith(others) or variable == "DELAYTASKS_APP"
