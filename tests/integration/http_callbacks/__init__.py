"""HTTP callbacks to a web server."""
