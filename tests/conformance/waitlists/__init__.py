"""Waitlists of limited tags, on every database."""
