"""Commands that show the cluster: board, status, serve."""
