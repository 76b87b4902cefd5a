"""The node's part of a launch: guard, supervisor, workers, store, preflight facts, teardown."""
