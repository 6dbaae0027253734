"""Cancel, reschedule and retry many tasks, on every database."""
