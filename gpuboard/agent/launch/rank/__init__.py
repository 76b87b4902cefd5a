"""What runs in the training interpreters of a node: the ranks' workers and the store, sent there as text."""
