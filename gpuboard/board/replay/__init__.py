"""The board on a recording in place of a cluster."""
