"""What the cluster's scheduler holds, and how to ask it for more."""
