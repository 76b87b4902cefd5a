"""Many feeds, one live picture of the cluster."""
