"""Agents as steps of a Slurm job."""
