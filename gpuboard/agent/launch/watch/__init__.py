"""Watching ranks on a node: cheap signs of activity each second, and a closer inspection when nothing moves."""
