"""The words about why a rank ended, from what it printed and how it ended (pure)."""
