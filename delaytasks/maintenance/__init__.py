"""The sweep, paused rows, and checks before a deployment."""
