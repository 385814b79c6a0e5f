"""`scripts/gpu-check`: times vLLM and the own engine on a GPU, and kills their workers. Uses random
weights of real shapes; downloads nothing."""
