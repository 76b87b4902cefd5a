"""The runs of a user: their folders, the list of them, requests to a running head."""
