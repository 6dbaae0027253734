"""Statistics on each database."""
