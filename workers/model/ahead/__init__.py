"""Steps ahead of their results: the GPU computes the next step while the last is read."""
