"""The Celery worker: its main process, and the context in which the pool's processes run tasks.

The dispatcher is the core of the main process. This is the way of a task through its modules; each
line names what the module adds:

============================================  =====================================================
`consumer`                                    brings entries, and drain messages, from the broker;
                                              the pollers of `broker.redis_timer` and
                                              `broker.direct` bring them from Redis or the table
`wheel`                                       keeps entries until they are due
`dispatcher`                                  takes what is due, chooses what the next chunk has
                                              (entries, a part of a drain, or a waitlist), and fills
                                              the pool; its docstring is the table of its decisions
`pool`                                        passes the chunk to Celery's pool, knows which
                                              process has it, and runs it in that process
============================================  =====================================================

`run.runner` claims, runs and settles the rows in the process of the pool, and returns a
`Report`. The report may hold entries that were early, which return to the wheel.

**What else arrives.** `sweep` and `quick_loops` start drains, the latter for the rows of a
process that died, and passes changed limits on. The processes of the pool read in the memory of
`processes` when leases were renewed, and whether other tasks wait for them.

**What leaves.** Chunks go to the pool, and a worker that stops returns to the timer what it has. A
row whose entry is dropped is claimed from the table, and `WorkerRuntime.watch` asks
other workers to help with that.

**Who owns which state.** `Dispatcher._lock` guards what waits: entries, drains and waitlists. Any
thread may take it, and no code that holds it waits for the database or the broker. `waiting`,
`is_at_work` and `pids` read without it, since a value that is a moment old does no harm. Celery's
pool belongs to one thread: the event loop, or `worker_runtime.CallThread` if the broker's transport
has no event loop. Other threads only ask for `Dispatcher.pump` by `call_soon`. The timing wheel has
a lock of its own.

**What to remember before a repair.** Each entry may be lost, late or repeated, because the claim
checks the row. Therefore a failed chunk is not sent again: `FailureReason` decides what waits, and
the sweep or the end of the lease brings its rows back.
"""
