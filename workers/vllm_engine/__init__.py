"""vLLM as the engine: the process that runs in vLLM's own environment, and its sampling plugin.

It imports batchway's `contract`, `workers.ipc` and `workers.engine` (msgspec alone), and from
`workers.model` what reads a tokenizer and draws tokens, and for vectors the loader. Redis
belongs to the supervisor.
"""
