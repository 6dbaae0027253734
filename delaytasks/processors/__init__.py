"""The registered processors, and the threads and the event loop that call them."""
