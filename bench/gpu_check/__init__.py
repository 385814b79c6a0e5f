"""`scripts/gpu-check`: compares kernels and engine with references on a GPU, then times them. Uses
random weights of real shapes; downloads nothing. Each stage is a process with a file of its own."""
