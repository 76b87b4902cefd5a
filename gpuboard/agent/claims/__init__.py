"""Claims on the GPUs of this node: small files in a sticky folder."""
