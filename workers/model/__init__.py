"""Loads a Hugging Face decoder and runs chunks of sequences on it. Torch lives only here.

Knows tensors and tokens. Leaves who runs when to the engine, and text to the supervisor.
"""

import os

# By default libgomp's threads, which torch's own operations use, spin at barriers. If another
# process uses the same cores, each operation then loses a scheduler tick (8 ms instead of 0.03 ms
# for a small matrix product). torch reads this setting on import. Our kernels have threads of
# their own (native/thread_pool.h).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
