"""Faults injected into real deployments, and the histories of what came of it, checked."""
