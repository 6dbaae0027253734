"""Callbacks: tasks that POST to a URL or send a message to a queue. See docs/callbacks.md."""

from delaytasks.callbacks.signatures import Received, verify, webhook

__all__ = ["Received", "verify", "webhook"]
