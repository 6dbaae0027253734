"""Recurring schedules: rows that say when tasks recur, from which sweeps make the tasks.

A process imports this package when it uses `DelayTasks.recurring`, or when its sweep finds that a
schedule is due. The modules:

====================  =============================================================================
`recurring`           the methods of `delays.recurring`, and the schedules that code declares
`definition`          checks the arguments of callers
`schedule`            a schedule as callers read it
`timing`              when a schedule is due: cron expressions, intervals and the sun
`celery_schedules`    the timing of Celery's `crontab` and `schedule`
`occurrences`         which occurrences a schedule needs now: missed ones, overlaps, jitter
`creation`            the stage of the sweep that writes the tasks
`targets`             the tag and body of a schedule, which may be those of a Celery task
`queries`             the SQL of all these
`imports`             reads the schedules of Celery beat, django-celery-beat and RedBeat
====================  =============================================================================
"""
