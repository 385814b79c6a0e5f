"""Programs to start from, each run by a test."""
