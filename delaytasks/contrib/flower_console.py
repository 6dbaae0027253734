"""Adds the console to Flower, as a tab. See docs/flower.md."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flower import urls
from flower.views import BaseHandler
from tornado.template import DictLoader
from tornado.web import FallbackHandler, authenticated, url
from tornado.wsgi import WSGIContainer

from delaytasks.api import default
from delaytasks.client import DelayTasks
from delaytasks.core.installed import needs_extra

with needs_extra("console", "the console"):
    from werkzeug.exceptions import NotFound
    from werkzeug.middleware.dispatcher import DispatcherMiddleware

from delaytasks.console.application import make_console
from delaytasks.console.viewers import HostAccess, Role, Viewer
from delaytasks.contrib.flask_console import derived_key

logger = logging.getLogger(__name__)
PATH, ANONYMOUS = "/delays", "anonymous"
#: Requests of the console that are served simultaneously, while Flower serves others.
CONSOLE_THREADS = 8
#: The name of the viewer in the WSGI environment of the console.
_VIEWER = "delaytasks.flower_viewer"
_TAB = """{%% set prefix = (handler.application.options.url_prefix or '').strip('/') %%}
<li class="nav-item"><a class="nav-link"
  href="{{ '/' + prefix if prefix else '' }}%s/">Delays</a></li>
"""


def add_console(
    *,
    roles: Mapping[str, Role] | None = None,
    role: Role | None = Role.VIEW,
    anonymous: Role | None = None,
    delays: DelayTasks | None = None,
) -> None:
    """Serve the console below `/delays` of Flower, and add a tab for it. Call it in
    `flowerconfig.py`.

    Parameters
    ----------
    roles
        The roles of Flower's users by name: the name of `--basic-auth`, or the address of `--auth`.
    role
        The role of users that `roles` does not name; None refuses them.
    anonymous
        The role of everyone if Flower has no authentication. By default, the console is then
        closed.
    delays
        The `DelayTasks`. By default that of the app.

    Examples
    --------
    >>> add_console(roles={"ann": Role.ADMIN})
    """
    rules = FlowerRules(dict(roles or {}), role, anonymous)
    given = {"console": FlowerConsole(delays), "rules": rules}
    urls.handlers.insert(0, url(rf"{PATH}(?:/.*)?", ConsoleHandler, given))
    urls.settings["template_loader"] = DictLoader(_templates(Path(urls.settings["template_path"])))


def _templates(folder: Path) -> dict[str, str]:
    """Return Flower's templates by name. The navigation has one tab more."""
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.html")}
    bar = found.get("navbar.html", "")
    end = bar.find("</ul>", max(bar.find("navbar-nav"), 0))
    if end < 0:
        logger.warning("this version of Flower has no place for a tab: open %s/", PATH)
    else:
        found["navbar.html"] = bar[:end] + _TAB % PATH + bar[end:]
    return found


class FlowerRules:
    """The roles of Flower's users."""

    def __init__(
        self, roles: Mapping[str, Role], role: Role | None, anonymous: Role | None
    ) -> None:
        self._roles = roles
        self._role = role
        self._anonymous = anonymous

    def viewer(self, name: str | None, is_read_only: bool) -> Viewer | None:
        """Return the viewer of a request; `name` is None if Flower has no authentication."""
        role = self._anonymous if name is None else self._roles.get(name, self._role)
        if role is None:
            return None
        return Viewer.of(name or ANONYMOUS, Role.VIEW if is_read_only else role)


class FlowerConsole:
    """The console in the threads of an executor, so that Flower's event loop does not wait."""

    def __init__(self, delays: DelayTasks | None) -> None:
        self._delays = delays
        self._executor = ThreadPoolExecutor(CONSOLE_THREADS, "delaytasks-console")
        self._app: Any = None

    def container(self, viewer: Viewer | None, prefix: str, secret: str) -> WSGIContainer:
        """Return the application that answers one request of `viewer`.

        Parameters
        ----------
        prefix
            The path of Flower.
        secret
            Flower's secret, from which that of the console is derived.
        """
        if self._app is None:  # made with the first request: the app of Celery is complete then
            self._app = self._mounted(prefix, secret)

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            return self._app({**environ, _VIEWER: viewer}, start_response)

        return WSGIContainer(answer, self._executor)

    def _mounted(self, prefix: str, secret: str) -> DispatcherMiddleware:
        access = HostAccess(lambda environ: environ[_VIEWER])
        console = make_console(
            self._delays or default(),
            access,
            secret_key=derived_key(secret),
            home=("Flower", f"{prefix}/"),
        )
        return DispatcherMiddleware(NotFound(), {f"{prefix}{PATH}": console})


class ConsoleHandler(FallbackHandler, BaseHandler):
    """Lets Flower's own authentication decide, and hands the request to the console."""

    def initialize(  # type: ignore[override]
        self, console: FlowerConsole, rules: FlowerRules
    ) -> None:
        self._console = console
        self._rules = rules

    def check_xsrf_cookie(self) -> None:
        """Do nothing: the forms of the console have tokens of their own."""

    @authenticated
    def prepare(self) -> None:  # type: ignore[override]
        options = self._options
        viewer = self._rules.viewer(self._user(), getattr(options, "read_only", False))
        prefix = (options.url_prefix or "").strip("/")
        self.fallback = self._console.container(
            viewer, f"/{prefix}" if prefix else "", self.settings["cookie_secret"]
        )
        super().prepare()

    @property
    def _options(self) -> Any:
        flower: Any = self.application
        return flower.options

    def _user(self) -> str | None:
        """Return the name of the user whom Flower has authenticated."""
        if isinstance(self.current_user, str):
            return self.current_user
        if not self._options.basic_auth:
            return None
        _, credentials = self.request.headers["Authorization"].split()
        return base64.b64decode(credentials).decode().partition(":")[0]
