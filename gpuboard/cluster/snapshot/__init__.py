"""Readings, claims and the scheduler's answer → one snapshot of the cluster."""
