"""Request + snapshot → the GPUs to take, or a refusal. Pure."""
