"""Example programs. A test runs each."""
