"""Log in at an OpenID provider."""

from __future__ import annotations

import logging
from typing import Any, cast

from flask import Flask, redirect, request, session, url_for
from werkzeug.wrappers import Response

from delaytasks.console.openid import OpenIDAccess
from delaytasks.console.pages_login import login_page, start_session
from delaytasks.console.requests import safe_next, state
from delaytasks.core.text import one_line

logger = logging.getLogger(__name__)
#: Seconds for which the configuration and the keys of the provider are kept.
CLIENT_S = 600.0


def install(app: Flask) -> None:
    app.add_url_rule("/login/openid", view_func=openid)
    app.add_url_rule("/login/openid/answer", view_func=openid_answer)


def _access() -> OpenIDAccess:
    return cast(OpenIDAccess, state().access)


def _client() -> Any:
    return state().cache.get("openid", CLIENT_S, _access().make_client)


def openid() -> Response | tuple[str, int]:
    """Send the browser to the provider."""
    session["next"] = request.args.get("next", "")
    try:
        answer: Response = _client().authorize_redirect(url_for("openid_answer", _external=True))
    except Exception:  # each HTTP and JSON library has its own, and the log has the traceback
        logger.exception("console: the OpenID provider cannot be used")
        return login_page("The login server cannot be used now. The log has the reason.", 503)
    return answer


def openid_answer() -> Response | tuple[str, int]:
    """Check what the provider says about the user, and begin a session."""
    target, address = session.pop("next", ""), request.remote_addr or ""
    try:
        found = _access().session_of(_client())
    except Exception as error:  # whatever a hostile answer causes, there is no login
        # Without the traceback, whose last line contains text of the request as it is.
        reason = one_line(f"{type(error).__name__}: {error}")
        logger.warning("console: refused OpenID login from %s: %s", address, reason)
        return login_page("The login was refused. Begin it again from this page.", 401)
    if found is None:
        logger.warning("console: OpenID login without a role from %s", address)
        return login_page("Your account has no role in this console.", 403)
    start_session(found)
    logger.info("console: OpenID login of %s from %s", one_line(found["user"], 60), address)
    return redirect(safe_next(target), 303)
