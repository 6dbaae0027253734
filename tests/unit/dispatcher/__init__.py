"""The dispatcher, with a simulated pool and a clock that the test sets."""
