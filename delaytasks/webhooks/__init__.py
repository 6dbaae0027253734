"""Tasks whose work is somebody else's: a POST to a URL, a message to a queue. See docs/callbacks.md."""

from delaytasks.webhooks.signatures import Received, verify

__all__ = ["Received", "verify"]
