"""The stateless HTTP side: validates, tokenises, submits to Redis and formats what comes back."""
