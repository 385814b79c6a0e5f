"""Tells callers what became of their jobs: a relay, RQ, and the delivery to a URL or into AWS."""
