"""Named checks, each with cause and remedy."""
