"""The registered processors, and the threads and the event loop in which they run."""
