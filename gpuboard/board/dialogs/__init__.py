"""Dialogs over a screen, and what they do."""
