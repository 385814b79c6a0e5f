"""Runs OpenAI's batches: files of calls."""
