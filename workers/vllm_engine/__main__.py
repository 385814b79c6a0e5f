"""`python -m workers.vllm_engine --fd N --options JSON`, by the interpreter of vLLM's environment.

Takes what `workers.engine_process.engine_loop` takes, and speaks the same frames.
"""

import os
import sys

from workers.engine_process.engine_loop import main

if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from workers.vllm_engine.load import start_vllm

    sys.exit(main(start=start_vllm))
