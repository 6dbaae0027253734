"""Several databases as one: which of them has a task, and which one takes a new task."""
