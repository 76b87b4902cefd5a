"""From a request to an allocation or a refusal."""
