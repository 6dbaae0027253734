"""Inject faults into real deployments, and check the recorded histories."""
