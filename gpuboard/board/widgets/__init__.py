"""Widgets on textual's Line API, and the text they draw above and below the rows."""
