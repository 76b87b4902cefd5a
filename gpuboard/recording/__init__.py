"""Recordings: what the board showed over time, in a file that is replayed later or elsewhere."""
