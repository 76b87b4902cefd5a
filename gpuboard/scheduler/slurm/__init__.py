"""Slurm, read and used through its own commands."""
