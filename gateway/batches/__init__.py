"""OpenAI's Batch API: its routes, and the feeder that runs batches."""
