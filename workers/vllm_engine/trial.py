"""The first step of a model in vLLM, before a worker is ready for it."""

import multiprocessing
import multiprocessing.connection
import threading

from contract.jobs import SamplingParams
from workers.engine.interface import ModelRefused
from workers.ipc.jobs import Request
from workers.vllm_engine.hosted import HostedEngine

_NUM_TOKENS = 4
_LOOK_S = 0.5
_GRACE_S = 2.0  # for vLLM to say why its process has ended
_MAX_MESSAGE = 500


def try_step(engine: HostedEngine, num_most: int, model_path: str) -> None:
    """Runs a request of a few tokens, at most `num_most` with its output. Some models load, and
    their first step then ends vLLM's core, for which `step` waits for ever. Raises ModelRefused."""
    prompt = tuple(range(min(_NUM_TOKENS, num_most - 1)))
    if not prompt:
        return
    # Samples in each way, so that vLLM's kernels for it are compiled before the first call.
    params = SamplingParams(
        max_tokens=2, seed=0, ignore_eos=True, top_k=2, top_p=0.9, presence_penalty=0.1, logprobs=1
    )
    failures: list[Exception] = []

    def run() -> None:
        try:
            engine.add(Request("trial", 0, "trial", "", (prompt,), params, ((),), (False,)))
            while engine.next_wake_s() is not None:
                failures.extend(RuntimeError(each.message) for each in engine.step().failed)
        except Exception as exc:
            failures.append(exc)

    trial = threading.Thread(target=run, daemon=True)
    trial.start()
    processes = multiprocessing.active_children()
    while trial.is_alive():
        if multiprocessing.connection.wait([each.sentinel for each in processes], _LOOK_S):
            trial.join(_GRACE_S)
            break
    reasons = [line_of(each) for each in failures]
    reasons += [f"{each.name} ended with {each.exitcode}" for each in processes if each.exitcode]
    if reasons:
        raise ModelRefused(
            f"vLLM loads {model_path}, but its first step fails, for the reason in vLLM's lines of "
            f"this log: {'; '.join(reasons)}"
        )


def line_of(exc: BaseException) -> str:
    """Its whole message in one line: the cause is not always in the first line."""
    return " ".join(str(exc).split())[:_MAX_MESSAGE] or type(exc).__name__
