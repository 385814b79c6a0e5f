"""Runs on AWS: the pool's size, and workers in ECS containers."""
