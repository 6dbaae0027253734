"""Claims rows, runs their processors, and settles the outcomes.

The modules, in the order of the path of a task:

    runner              claims the rows of one chunk, and reports what became of them
    claim_ahead         in a backlog, claims the next chunk while the current one runs
    policy_cache        keeps the policies of tags and queues, and holds rows that are paused
    chunk               the rows of one claim, and the thread of their time budget
    chunk_runner        runs the rows of a chunk one by one, in batches or in threads
    executor            calls a processor for one task or a batch, and decides from the result how
                        each row is settled
    settlement          writes settlements, with retries, and arms the tasks that run again
"""
