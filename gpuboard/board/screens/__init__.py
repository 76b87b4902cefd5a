"""The board's full screens."""
