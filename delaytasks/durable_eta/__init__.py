"""Celery messages that wait as rows, and are published when they are due.

See docs/durable-eta.md, and docs/move-from-eta.md for `delaytasks adopt-eta`. The modules:

====================  =============================================================================
`capture`             gets the message that Celery has prepared, in place of the broker
`stored_message`      the message, and its conversion to and from the body of a row
`etas`                reads the eta of a message
`publisher`           sends many messages, and returns which ones the broker has confirmed
`confirms`            waits for RabbitMQ's confirmations of a batch
`revoking`            finds the rows that a revoke names
`broker_queues`       adopt-eta: the queues of a broker in which messages with an eta may wait
`redis_source`        adopt-eta: takes such messages from Redis
`amqp_source`         adopt-eta: takes such messages from RabbitMQ
`waiting_message`     adopt-eta: a message that waits, with its eta
====================  =============================================================================
"""
