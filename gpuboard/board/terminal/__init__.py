"""The terminal around the board: driver, first frame, key order, leaving it as it was."""
