"""Pauses and limits."""

from __future__ import annotations

from typing import Any

from flask import Flask, abort, render_template, request
from werkzeug.wrappers import Response

from delaytasks.console.actions import act
from delaytasks.console.requests import requires, state, viewer
from delaytasks.console.viewers import Role
from delaytasks.core.errors import InvalidPolicyError
from delaytasks.core.policies import UNCHANGED, Policy


def install(app: Flask) -> None:
    app.add_url_rule("/policies", view_func=policies)
    app.add_url_rule("/policies/pause", view_func=pause, methods=["POST"])
    app.add_url_rule("/policies/resume", view_func=resume, methods=["POST"])
    app.add_url_rule("/policies/limits", view_func=set_limits, methods=["POST"])
    app.add_url_rule("/policies/clear", view_func=clear_policy, methods=["POST"])


@requires(Role.VIEW)
def policies() -> str:
    found, tag = state().snapshot(), request.args.get("tag", "").strip()
    return render_template(
        "policies.html", page="policies", s=found, now=found.now, edited=_limited(tag)
    )


def _limited(tag: str) -> Policy | None:
    """Return the policy of a tag, as it is stored now, if it has limits."""
    stored = state().delays.policies(tag=tag) if tag else []
    return next((policy for policy in stored if policy.has_limits), None)


def _named() -> dict[str, Any]:
    kind, name = request.form.get("kind"), request.form.get("name", "").strip()
    if kind not in ("tag", "queue"):
        abort(400)
    return {kind: name}


@requires(Role.OPERATE)
def pause() -> Response:
    named, delays = _named(), state().delays

    def do() -> str:
        policy = delays.pause(**named, actor=viewer().name)
        return f"The {policy.kind} {policy.name} is paused. Tasks that run will finish."

    return act("pause", named, do)


@requires(Role.OPERATE)
def resume() -> Response:
    named, delays = _named(), state().delays

    def do() -> str:
        policy = delays.resume(**named, actor=viewer().name)
        return f"The {policy.kind} {policy.name} continues."

    return act("resume", named, do)


@requires(Role.ADMIN)
def set_limits() -> Response:
    named, delays = _named(), state().delays
    given = {name: request.form[name].strip() for name in _LIMITS if name in request.form}

    def do() -> str:
        tag = named.get("tag", "")
        if "is_change" not in request.form and _limited(tag) is not None:
            raise InvalidPolicyError(f"the tag {tag} has limits already: change them in the list")
        limits = {name: _limit(name, text) for name, text in given.items()}
        policy = delays.set_policy(**named, **limits, actor=viewer().name)
        return f"The limits of the {policy.kind} {policy.name} are changed."

    return act("set_limits", {**named, **given}, do)


_LIMITS = ("concurrency", "key_concurrency", "rate")


def _limit(name: str, text: str) -> Any:
    """Return the limit that a field says; an empty field means no limit."""
    if text == "unchanged":
        return UNCHANGED
    if not text:
        return None
    if name == "rate":
        return text
    if not text.isdigit():
        raise InvalidPolicyError(f"{name} is a number, not {text!r:.40}")
    return int(text)


@requires(Role.ADMIN)
def clear_policy() -> Response:
    named, delays = _named(), state().delays

    def do() -> str:
        policy = delays.clear_policy(**named, actor=viewer().name)
        return f"The pause and the limits of the {policy.kind} {policy.name} are removed."

    return act("clear_policy", named, do)
