"""What a GPU computes beside attention and matrix products, and in what order it is told to."""
