"""Runs flows: calls of several models that answer as one."""
