"""Commands that show: board, status, serve."""
