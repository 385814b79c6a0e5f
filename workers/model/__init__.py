"""Loads a Hugging Face decoder and runs chunks of sequences on it. Torch lives only here.

Knows tensors and tokens. Leaves who runs when to the engine, and text to the supervisor.
"""

import os

# libgomp's threads spin at every barrier by default. Where another process wants the same cores
# that costs a scheduler tick per operation: 8 ms instead of 0.03 ms for a small matrix product,
# measured on two busy cores. Read once, when torch loads libgomp: so before torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
