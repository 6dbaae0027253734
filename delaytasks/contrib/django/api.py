"""Mounts the HTTP API in the URLs of a Django project. See docs/http-api.md."""

from __future__ import annotations

import functools
from typing import Any

from delaytasks.client import DelayTasks
from delaytasks.core.installed import needs_extra

with needs_extra("api", "the HTTP API"):
    from flask import Flask

from delaytasks.contrib.django.wsgi import wsgi_urls
from delaytasks.http_api.api_keys import FindsKeys
from delaytasks.http_api.application import make_api


def api_urls(keys: FindsKeys, delays: DelayTasks | None = None, **options: Any) -> list[Any]:
    """Return the URL patterns of the HTTP API, for `include`.

    Parameters
    ----------
    keys
        The API keys.
    delays
        The `DelayTasks`. By default that of the project.
    **options
        The options of `make_api`.

    Examples
    --------
    >>> keys = ApiKeyFile(Path("api-keys.json"))
    >>> urlpatterns = [path("delays/", include(api_urls(keys)))]
    """

    @functools.cache
    def api() -> Flask:
        # Made with the first request: the settings may not be complete before.
        from delaytasks.api import default

        return make_api(delays or default(), keys, **options)

    return wsgi_urls(api, "delaytasks-api")
