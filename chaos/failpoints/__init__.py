"""Kill real processes at each step of a task, and measure how long the recovery takes."""
