"""Attention over a paged KV cache: one interface, exchangeable back ends."""
