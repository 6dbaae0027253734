"""Real processes killed at each step of a task's way, and how long it takes until all is well again."""
