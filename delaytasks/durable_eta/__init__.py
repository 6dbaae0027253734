"""Celery messages that wait as rows, and are published when they are due.

See docs/durable-eta.md. The modules:

====================  =============================================================================
`capture`             gets the message that Celery has prepared, in place of the broker
`stored_message`      the message, and its conversion to and from the body of a row
`publisher`           sends many messages, and returns which ones the broker has confirmed
`confirms`            waits for RabbitMQ's confirmations of a batch
`revoking`            finds the rows that a revoke names
====================  =============================================================================
"""
