"""Other engines on the same workload, each in a virtual environment of its own."""
