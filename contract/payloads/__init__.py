"""Where prompts and results lie that are too large for Redis. Gateways and workers share it."""
