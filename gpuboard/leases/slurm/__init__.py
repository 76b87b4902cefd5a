"""Leases that are Slurm jobs."""
