"""Concurrency limits and rate limits: which due tasks may start, and in which order.

A process that runs tasks imports this package. Rows that may not start yet
are HELD, and each has an entry in the waitlist of its queue and tag. The modules:

============================  =====================================================================
`waitlist`                    after a claim: lets as many rows start as there is capacity, and
                              holds the others
`waitlist_runner`             after a chunk: runs the rows of a waitlist, each in the slot that the
                              one before it has left
`admission`                   chooses how many rows of a waitlist start, and takes them from it
`capacity`                    counts how many may start, from the policy and from the running rows
`fair_order`                  chooses which start: keys take turns
`backlogs`                    holds overdue rows of limited tags in bulk, so that no key blocks
                              the others
`queries`                     the SQL of all these
`tracked_waitlists`           in the main process: which waitlists there are, and when the next
                              process has to visit one
============================  =====================================================================

The first seven run in the processes of the pool, in this chain: `Waitlist`, `WaitlistRunner` and
`LimitedBacklogs` are called by `execution.runner`, and a waitlist calls `Admission`, which asks
`CapacityMeter` for the number and `FairOrder` for the rows. `TrackedWaitlists` belongs to the
dispatcher's `ChunkQueue`, and learns from the reports of chunks (`core.waitlists`).
"""
