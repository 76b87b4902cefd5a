"""Which nodes there are, and how each is reached."""
