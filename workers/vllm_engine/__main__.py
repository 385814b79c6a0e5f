"""`python -m workers.vllm_engine --fd N --options JSON`, by the interpreter of vLLM's environment.

Takes the same arguments as `workers.engine_process.engine_loop`, and exchanges the same frames.
vLLM's own processes are in this one's group, which is killed as soon as this one has ended.
"""

import logging
import multiprocessing
import multiprocessing.connection
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from workers.engine.interface import ModelRefused
from workers.engine.jobs import JobEngine
from workers.engine_process.engine_loop import ExitCode, main, start_own
from workers.ipc.messages import EngineOptions, EngineReady
from workers.ipc.nodes import meet
from workers.model.nvidia import unusable_gpu, visible_gpus
from workers.model.pooling.folder import read_folder
from workers.vllm_engine.compile_cache import use_compile_cache
from workers.vllm_engine.stages import Stages
from workers.vllm_engine.start_check import check_release

log = logging.getLogger("batchway.engine")

_GRACE_S = 5.0
_LOOK_S = 0.5


def _end_group_with_this_process(fd: int) -> None:
    """Starts a process that kills the group once this one has ended, also by SIGKILL: vLLM's
    processes do not notice that, and would keep their memory."""
    pid = os.getpid()
    if os.getpgrp() != pid or os.fork() != 0:
        return
    os.close(fd)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == pid:
        time.sleep(_LOOK_S)
    os.killpg(pid, signal.SIGKILL)


def _end_with_supervisor(fd: int) -> None:
    """Waits for the end of the socket, then ends the process if it still runs."""
    poll = select.poll()
    poll.register(fd, select.POLLRDHUP | select.POLLHUP)
    poll.poll()
    time.sleep(_GRACE_S)
    _leave(ExitCode.CRASHED)


def _end_with_vllm() -> NoReturn:
    """Ends the process when the first of vLLM's own has ended: `step` would wait for ever."""
    children = [child.sentinel for child in multiprocessing.active_children()]
    multiprocessing.connection.wait(children)
    log.error("a process of vLLM has ended")
    _leave(ExitCode.CRASHED)


def _leave(status: int) -> NoReturn:
    """Ends vLLM's processes, for which it would otherwise wait, and this one."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(status)


def _start(
    options: EngineOptions, progress: Callable[[str], None]
) -> tuple[JobEngine, EngineReady, int]:
    """Starts the engine. Does not return on a node other than node 0: that has ranks alone."""
    vectors = read_folder(options.model_path, options.revision)
    use_compile_cache(options.model_path)
    stages = Stages(progress)
    stages.progress("importing vLLM")
    with stages.timed("imports"):
        import torch
        from vllm import __version__

        check_release(__version__)
        fault = unusable_gpu(visible_gpus(), torch.version.cuda)
        if fault and options.device != "cpu":
            helps = ", by scripts/setup-vllm, or give --device cpu"
            raise ModelRefused(fault + helps * (torch.version.cuda is None))
        from vllm.logger import DEFAULT_LOGGING_CONFIG

        from workers.vllm_engine.load import engine_args, start_ranks, start_vllm

    if options.nodes > 1:
        engine_args(options)  # what vLLM refuses is refused before the nodes wait for each other
        try:
            options = meet(options, stages.progress, lambda: _leave(ExitCode.CRASHED))
        except OSError as exc:
            raise ModelRefused(f"--master {options.master}: {exc.strerror}") from exc
    with stages.listening(DEFAULT_LOGGING_CONFIG):
        if options.node_rank > 0:
            _ranks = start_ranks(options, stages)
            _end_with_vllm()
        if vectors is None:
            started: tuple[JobEngine, EngineReady, int] = start_vllm(options, stages)
        else:
            from workers.vllm_engine.vectors import load_vectors

            started = start_own(partial(load_vectors, vectors, stages))(options, stages.progress)
    threading.Thread(target=_end_with_vllm, daemon=True).start()
    return started


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    number = int(sys.argv[sys.argv.index("--fd") + 1])
    _end_group_with_this_process(number)
    threading.Thread(target=_end_with_supervisor, args=[os.dup(number)], daemon=True).start()
    _leave(main(start=_start))
