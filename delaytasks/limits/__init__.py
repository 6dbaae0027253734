"""Concurrency limits and rate limits: which due tasks may start, and in which order.

Rows that may not start yet are HELD, and each has an entry in the waitlist of its queue and tag.

`admission`
    In the processes of the pool: counts how many rows may start, chooses which (keys take turns),
    holds the others, and takes rows from their waitlist. `run.runner` calls it, and its claims do.
`tracked_waitlists`
    In the main process: which waitlists there are, and when the next process has to visit one. The
    `Dispatcher` calls it, and it learns from the reports of chunks.
"""
