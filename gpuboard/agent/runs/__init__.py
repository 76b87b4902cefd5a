"""The runs of this user on this node, for a client that asks: their states and logs, and requests to their heads."""
