"""Runs in which nothing moves: evidence from the nodes, who waits for whom, the verdict, when to give it."""
