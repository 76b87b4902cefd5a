"""The keeper sends heartbeats for a user's leases while their holders are alive."""
