"""Exchanges modules of a loaded decoder for faster ones of the same meaning."""
