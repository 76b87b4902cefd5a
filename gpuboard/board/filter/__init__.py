"""The filter's language. Pure."""
