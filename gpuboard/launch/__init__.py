"""From an allocation to running ranks, and what became of them."""
