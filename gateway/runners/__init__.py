"""What runs without a caller: flows and batches; and how their jobs are queued."""
