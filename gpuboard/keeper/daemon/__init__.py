"""The process: leases, the commands that hand them over, and heartbeats to their nodes."""
