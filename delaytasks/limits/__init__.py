"""Concurrency limits and rate limits: which due tasks may start, and in which order.

A process that runs tasks imports this package. Rows that may not start yet
are HELD, and each has an entry in the waitlist of its queue and tag. The modules:

============================  =====================================================================
`admission`                   counts how many rows may start, chooses which (keys take turns), holds
                              the others, and takes rows from their waitlist
`limit_queries`               the SQL of it
`tracked_waitlists`           in the main process: which waitlists there are, and when the next
                              process has to visit one
============================  =====================================================================

The first two run in the processes of the pool. `run.runner` calls `Waitlist`, `LimitedBacklogs` and
`Admission`, which asks `CapacityMeter` for the number and `FairOrder` for the rows. `TrackedWaitlists` belongs to the
dispatcher's `ChunkQueue`, and learns from the reports of chunks.
"""
