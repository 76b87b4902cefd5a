"""What the board writes, as text and cells. Pure; no textual."""
