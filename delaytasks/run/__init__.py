"""Claims rows, runs their processors, and settles the outcomes.

The modules, in the order of the path of a task:

    runner          claims the rows of one chunk, in a backlog while the last one runs, and reports
                    what became of them
    chunk           the rows of one claim, run one by one, in batches or in threads within their
                    time budget; writes their settlements, with retries, and arms the tasks that run
                    again
    calls           calls a processor for one task or a batch, unless the rows are not run here, and
                    decides by the outcome how each task is settled
    celery_context  the current task, signals and time limits of Celery around a call
    observers       what sees each run: the structured log, and the counts by tag and outcome
"""
