"""Request + snapshot → allocation or refusal. Pure."""
