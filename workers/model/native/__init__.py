"""The CPU kernels: one source file, its builder, and typed calls on tensors."""
