"""Replaces modules of a loaded decoder by faster equivalents."""
