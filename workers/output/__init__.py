"""Reads outputs: reasoning, tool calls and content. Uses no tensors and no Redis."""
