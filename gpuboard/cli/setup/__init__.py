"""Commands that set up and demonstrate: demo, config."""
