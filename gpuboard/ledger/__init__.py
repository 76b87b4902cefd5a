"""Who reserved what, and the keeper that keeps leases alive while their holders live."""
