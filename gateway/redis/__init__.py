"""The gateway's access to Redis, and its caches."""
