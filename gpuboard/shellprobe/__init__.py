"""Reads a node without python3 through its shell and nvidia-smi."""
