"""The stateless HTTP side: validates requests, queues jobs in Redis and formats their output."""
