"""SSH through asyncssh, the system's ssh or paramiko, and what the three share."""
