"""The gateway's access to Redis, and what it remembers of it."""
