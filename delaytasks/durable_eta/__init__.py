"""Celery messages that wait as rows, and are published when they are due.

See docs/durable-eta.md. `stored_message` has the message that Celery has prepared, its conversion
to and from the body of a row, and the rows that a revoke names. `message_publisher` sends many
messages, and returns which ones the broker has confirmed.
"""
