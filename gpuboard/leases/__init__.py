"""From a request to a lease or a refusal, and what can be done with leases."""
