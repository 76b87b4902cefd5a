"""Leases made of claims on the nodes."""
