"""The board in a browser (extra `web`)."""
