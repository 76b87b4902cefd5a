"""A package with relative imports."""
