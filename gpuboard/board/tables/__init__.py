"""The content of tables, for the board and for commands. Pure."""
