"""Commands that reserve: allocate, leases, renew, release, env."""
