"""Metrics and traces: their names, counts and pages."""
