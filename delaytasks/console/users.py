"""The file of the console's users: names, hashed passwords and roles."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from werkzeug.security import check_password_hash, generate_password_hash

from delaytasks.console.viewers import Role, Viewer
from delaytasks.core.errors import ConfigError
from delaytasks.core.private_files import make_folder, write_file
from delaytasks.core.watched_file import WatchedFile

#: A shorter password is refused.
MIN_PASSWORD = 10
#: The hash that an unknown name is compared with, so that it takes as long as a known one.
_NOBODY = generate_password_hash(secrets.token_urlsafe())
FIRST_USER = "admin"


class UserFile:
    """Users who log in on the console's own page. The file is read again when it changes."""

    has_login = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = WatchedFile(path, {"users": {}}, _read_users, "console users")

    # -- read -------------------------------------------------------------------------------------

    def users(self) -> dict[str, dict[str, str]]:
        """Return the users by name; none if there is no file yet."""
        return self._file.read()

    def role(self, name: str) -> Role | None:
        user = self.users().get(name)
        return None if user is None else Role.named(user["role"])

    def viewer(self, environ: Mapping[str, Any], session: Mapping[str, Any]) -> Viewer | None:
        """Return the user of a session, unless the password has changed since the login."""
        name = session.get("user")
        user = self.users().get(name) if isinstance(name, str) else None
        if user is None or session.get("password") != _mark(user.get("password", "")):
            return None
        return Viewer.of(name, user["role"])

    def check(self, name: str, password: str) -> dict[str, str] | None:
        """Return what the session of a user keeps, or None if name or password is wrong."""
        hashed = self.users().get(name, {}).get("password", "")
        is_right = check_password_hash(hashed or _NOBODY, password)
        return {"user": name, "password": _mark(hashed)} if hashed and is_right else None

    # -- write ------------------------------------------------------------------------------------

    def set(self, name: str, password: str, role: Role) -> None:
        """Add a user, or replace one."""
        if not name.strip():
            raise ConfigError("the name of a console user is not empty")
        if len(password) < MIN_PASSWORD:
            raise ConfigError(f"a password of the console has at least {MIN_PASSWORD} characters")
        users = dict(self.users())
        users[name] = {"password": generate_password_hash(password), "role": role.label}
        self._file.write({"users": users})

    def remove(self, name: str) -> bool:
        """Remove a user; return False if there is none of this name."""
        users = dict(self.users())
        is_known = users.pop(name, None) is not None
        if is_known:
            self._file.write({"users": users})
        return is_known

    def make_first(self) -> str | None:
        """Make an administrator if there are no users, and return the generated password."""
        if self.users():
            return None
        password = secrets.token_urlsafe(15)
        self.set(FIRST_USER, password, Role.ADMIN)
        return password


def session_key(path: Path) -> str:
    """Return the key that signs sessions. It is made once, so sessions survive a restart."""
    try:
        return path.read_text(encoding="ascii")
    except FileNotFoundError:
        make_folder(path.parent)
        write_file(path, secrets.token_hex(32))
        return path.read_text(encoding="ascii")


def _read_users(document: Any) -> dict[str, dict[str, str]]:
    users: dict[str, dict[str, str]] = document["users"]
    for each in users.values():
        Role.named(each["role"])
    return users


def _mark(hashed: str) -> str:
    """Return a value that changes with the password and reveals nothing about it."""
    return hashlib.sha256(f"console session:{hashed}".encode()).hexdigest()[:16]
