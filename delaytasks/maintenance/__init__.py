"""The sweep: recovers, arms, drains and deletes rows, and holds and releases paused ones."""
