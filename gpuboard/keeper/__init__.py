"""The keeper keeps a user's leases alive while their holders live."""
