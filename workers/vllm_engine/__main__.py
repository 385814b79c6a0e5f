"""`python -m workers.vllm_engine --fd N --options JSON`, by the interpreter of vLLM's environment.

Takes what `workers.engine_process.engine_loop` takes, and speaks the same frames. vLLM's own
processes are in this one's group: where the supervisor is gone and a step hangs, all are killed.
"""

import multiprocessing
import os
import select
import signal
import sys
import threading
import time

from workers.engine_process.engine_loop import main

_GRACE_S = 5.0


def _end_with_supervisor(fd: int) -> None:
    """Waits for the end of the socket; kills the group where nobody has left by then."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP | select.POLLHUP)
    poll.poll()
    time.sleep(_GRACE_S)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from workers.vllm_engine.load import start_vllm

    number = int(sys.argv[sys.argv.index("--fd") + 1])
    threading.Thread(target=_end_with_supervisor, args=[os.dup(number)], daemon=True).start()
    status = main(start=start_vllm)
    for child in multiprocessing.active_children():  # vLLM would wait for each to end by itself
        child.kill()
    sys.exit(status)
