"""From a request to a lease or a refusal; listing, renewing and releasing leases."""
