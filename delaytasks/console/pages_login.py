"""Log in, log out, and the viewer's preferences."""

from __future__ import annotations

import logging

from flask import Flask, abort, redirect, render_template, request, session, url_for
from werkzeug.wrappers import Response

from delaytasks.console.actions import back
from delaytasks.console.requests import now_s, requires, safe_next, state
from delaytasks.console.shown import zone_of
from delaytasks.console.users import UserFile
from delaytasks.console.viewers import Role
from delaytasks.core.text import one_line

logger = logging.getLogger(__name__)
THEMES = ("auto", "light", "dark")


def install(app: Flask) -> None:
    app.add_url_rule("/login", view_func=login, methods=["GET"])
    app.add_url_rule("/login", view_func=log_in, methods=["POST"])
    app.add_url_rule("/logout", view_func=log_out, methods=["POST"])
    app.add_url_rule("/preferences", view_func=preferences, methods=["POST"])


def login() -> tuple[str, int]:
    if not state().access.has_login:
        abort(404)
    return _login_page(None, 200)


def log_in() -> tuple[str, int] | Response:
    users, limit = state().access, state().logins
    if not isinstance(users, UserFile):
        abort(404)
    name, address = request.form.get("name", ""), request.remote_addr or ""
    wait_s = limit.wait_s(name[:200], address)
    if wait_s:
        return _login_page(f"Too many failed logins. Try again in {wait_s:.0f} seconds.", 429)
    found = users.check(name, request.form.get("password", "")[:1000])
    if found is None:
        limit.failed(name[:200], address)
        logger.warning("console: failed login as %s from %s", one_line(name, 60), address)
        return _login_page("The name or the password is wrong.", 401)
    limit.succeeded(name[:200], address)
    kept = {each: session[each] for each in ("zone", "theme") if each in session}
    session.clear()  # also the CSRF token: an attacker may have set the old one
    session.permanent = True
    session.update(kept, logged_in_at=now_s(), **found)
    logger.info("console: login of %s from %s", one_line(name, 60), address)
    return redirect(safe_next(request.form.get("next")), 303)


def _login_page(problem: str | None, code: int) -> tuple[str, int]:
    target = request.values.get("next", "")
    return render_template("login.html", next=target, problem=problem), code


@requires(Role.VIEW)
def log_out() -> Response:
    session.clear()
    return redirect(url_for("login" if state().access.has_login else "overview"), 303)


@requires(Role.VIEW)
def preferences() -> Response:
    """Choose the time zone and the colours."""
    zone, theme = request.form.get("zone"), request.form.get("theme")
    if zone and zone_of(zone) is not None:
        session["zone"] = zone
    if theme in THEMES:
        session["theme"] = theme
    return back()
