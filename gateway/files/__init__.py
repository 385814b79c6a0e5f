"""Stored files: their contents, ranges and quota."""
