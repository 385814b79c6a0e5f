"""Measures batchway: workloads, runs, reports. Nothing in production imports this."""
