"""Warnings about a script, from its syntax tree: what is known to hang or fail under a launcher."""
