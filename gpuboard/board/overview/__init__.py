"""The cluster in short: who holds what, what ends next, and events, kept between starts. No textual."""
