"""vLLM as the engine: the process that runs in vLLM's own environment, and its sampling plugin.

Of batchway it imports `contract`, `workers.ipc` and `workers.engine` (msgspec alone), and from
`workers.model` what reads a tokenizer and what draws tokens; Redis is the supervisor's.
"""
