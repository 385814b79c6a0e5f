"""`scripts/gpu-check`: kernels and engine against references on this machine's GPU, then timed.

Random weights of real shapes serve: nothing is downloaded.
"""
