"""GPU code beside attention and matrix products, and the order of its steps."""
