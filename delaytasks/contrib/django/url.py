"""Makes the SQLAlchemy URL of a Django database, by which workers reach its tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import URL

from delaytasks.core.errors import ConfigError

#: Options of Django and of psycopg 3 that psycopg2 does not know.
_NOT_LIBPQ = frozenset(
    "assume_role context cursor_factory isolation_level pool prepare_threshold row_factory "
    "server_side_binding".split()
)
#: Options that both MySQL drivers accept in a URL. The storage sets character set and isolation.
_MYSQL_OPTIONS = frozenset(
    "connect_timeout init_command read_default_file read_default_group read_timeout sql_mode "
    "unix_socket write_timeout".split()
)
#: Django's options of TLS, which the drivers know with the prefix `ssl_`.
_TLS_OPTIONS = ("ca", "capath", "cert", "key", "cipher")
#: For each `ssl_mode` that requires TLS, whether the server name is checked.
_TLS_MODES = {"REQUIRED": "false", "VERIFY_CA": "false", "VERIFY_IDENTITY": "true"}


def database_url(vendor: str, database: Mapping[str, Any]) -> str:
    """Return the URL of an entry of settings.DATABASES (`settings_dict` of a connection)."""
    try:
        make = _BY_VENDOR[vendor]
    except KeyError:
        raise ConfigError(
            f"settings.DATABASES: delaytasks cannot use a {vendor!r} database (only "
            f"{', '.join(_BY_VENDOR)}); name another alias in settings.DELAYTASKS['database']"
        ) from None
    return make(database).render_as_string(hide_password=False)


def _postgresql(database: Mapping[str, Any]) -> URL:
    options = database.get("OPTIONS") or {}
    query = {
        name: str(value)
        for name, value in options.items()
        if name not in _NOT_LIBPQ and _is_plain(value)
    }
    role = options.get("assume_role")
    if role:
        escaped = str(role).replace(" ", r"\ ")
        query["options"] = f"{query.get('options', '')} -c role={escaped}".strip()
    host, port = str(database.get("HOST") or ""), str(database.get("PORT") or "")
    # A socket's folder, or several hosts.
    if not _fits_before_slash(host) or (port and not port.isdigit()):
        query |= {"host": host} | ({"port": port} if port else {})
        host = port = ""
    return _url("postgresql+psycopg2", database, host, port, query)


def _mysql(database: Mapping[str, Any]) -> URL:
    options = database.get("OPTIONS") or {}
    query = {name: str(value) for name, value in options.items() if name in _MYSQL_OPTIONS}
    tls = options.get("ssl") or {}
    query |= {f"ssl_{name}": str(tls[name]) for name in _TLS_OPTIONS if tls.get(name)}
    mode = str(options.get("ssl_mode", "")).upper()
    if mode in _TLS_MODES:
        query["ssl_check_hostname"] = _TLS_MODES[mode]
    host = str(database.get("HOST") or "")
    if host.startswith("/"):
        query["unix_socket"], host = host, ""
    host = host or ("localhost" if "read_default_file" not in query else "")
    return _url("mysql+pymysql", database, host, str(database.get("PORT") or ""), query)


def _sqlite(database: Mapping[str, Any]) -> URL:
    name = str(database["NAME"])
    # Django's test databases in memory are named like this; any other name is a file.
    query = {"uri": "true"} if name.startswith("file:") else {}
    path, _, parameters = name.partition("?") if query else (name, "", "")
    query |= dict(pair.partition("=")[::2] for pair in parameters.split("&") if pair)
    return URL.create("sqlite", database=path, query=query)


_BY_VENDOR: dict[str, Callable[[Mapping[str, Any]], URL]] = {
    "postgresql": _postgresql,
    "mysql": _mysql,
    "sqlite": _sqlite,
}


def _url(
    driver: str, database: Mapping[str, Any], host: str, port: str, query: Mapping[str, str]
) -> URL:
    return URL.create(
        driver,
        username=str(database.get("USER") or "") or None,
        password=str(database.get("PASSWORD") or "") or None,
        host=host or None,
        port=int(port) if port else None,
        database=str(database.get("NAME") or "") or None,
        query=query,
    )


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, int)) or hasattr(value, "__fspath__")


def _fits_before_slash(host: str) -> bool:
    return "/" not in host and "," not in host and not host.startswith("@")
