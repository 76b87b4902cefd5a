"""Detached runs: their head outlives the terminal and the connection from which they were launched."""
