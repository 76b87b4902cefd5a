"""Restarts of a run that has failed (``--max-restarts``): when, on which GPUs, and the loop over the attempts."""
