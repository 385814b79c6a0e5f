"""Whatever a user of Redis with one role writes, no process of another part ends."""
