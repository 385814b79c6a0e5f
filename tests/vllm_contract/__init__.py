"""What batchway uses of vLLM, tried on the sources of vLLM's GPU build, without a GPU."""
