"""Verifies the callbacks that a Django project receives."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from delaytasks.core.errors import BodyNotJSONError, InvalidSignatureError
from delaytasks.webhooks import verify


def verified(
    secrets: str | Iterable[str],
) -> Callable[[Callable[..., HttpResponse]], Callable[..., HttpResponse]]:
    """Decorate a view `f(request, callback)` so that only signed callbacks reach it.

    Other requests are answered with 401. The signature replaces Django's CSRF token.

    Parameters
    ----------
    secrets
        The secret, or the secrets while they are rotated, that sign callbacks.

    Returns
    -------
    callable
        The decorator.

    Examples
    --------
    >>> @verified(settings.CALLBACK_SECRET)
    ... def order_closed(request, callback): ...
    """

    def decorate(view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
        @functools.wraps(view)
        def check(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            try:
                callback = verify(request.body, request.headers, secrets)
            except InvalidSignatureError as error:
                return HttpResponse(str(error), status=401, content_type="text/plain")
            except BodyNotJSONError as error:
                return HttpResponse(str(error), status=400, content_type="text/plain")
            return view(request, callback, *args, **kwargs)

        receive: Callable[..., HttpResponse] = csrf_exempt(require_POST(check))
        return receive

    return decorate
