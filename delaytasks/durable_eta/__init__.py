"""Celery messages that wait as rows, and are published when they are due.

See docs/durable-eta.md. Three modules make up the way of a message:

- `capture.CapturingProducer` gets the message that Celery has prepared, in place of the broker.
- `stored_message.StoredMessage` is the message: `as_body()` and `of_body()` convert it to and from
  the body of a row, `of_delivery()` reads a message that a broker delivers, and `of_virtual()` one
  as kombu stores it in Redis.
  `stored_message.new_task()` returns the row to schedule.
- `publisher.MessagePublisher.publish()` sends many messages, and returns which ones the broker has
  confirmed.

`delaytasks adopt-eta` uses the other modules, see docs/move-from-eta.md.
`broker_queues.BrokerQueues.sources()` yields the places where messages wait, which are in
`redis_source` and `amqp_source`, and `waiting_message.read()` returns a message with its eta.
"""
