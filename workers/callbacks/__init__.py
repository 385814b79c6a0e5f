"""Delivers callbacks about jobs: a relay, RQ, and delivery to a URL or into AWS."""
