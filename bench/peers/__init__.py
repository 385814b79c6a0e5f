"""Other engines on the same workload, each in its own virtual environment."""
