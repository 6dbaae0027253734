"""Claims rows, runs their processors, and settles the outcomes.

The modules, in the order of the path of a task:

    runner              claims the rows of one chunk, and reports what became of them
    claim_ahead         in a backlog, claims the next chunk while the current one runs
    pause_filter        holds the claimed rows that are paused
    chunk               the rows of one claim, and the thread of their time budget
    chunk_runner        runs the rows of a chunk, and closes it
    concurrent_calls    runs rows in threads or as coroutines at the same time
    executor            turns one call of a processor into settlements
    processor_call      the call, for one task or for a batch
    task_run            one of its tasks: its lease, and completion in the processor's transaction
    deferral_rules      which tasks do not run here, and why
    outcome_rules       what a returned outcome or an error means for the task
    settlement          writes settlements, with retries, and arms the tasks that run again
    failure_reason      why a chunk failed as a whole

`policy_cache` keeps the policies of tags and queues, and holds claimed rows that are paused.
"""
