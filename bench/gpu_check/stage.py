"""`python -m bench.gpu_check.stage NAME --out FILE --seconds N`: one stage, in this process.

Exit status 0: it ran to its end, whatever it found; 1: it did not; 2: there is no GPU.
"""

import argparse
import faulthandler
import logging
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_check.results import Results
from bench.gpu_check.stages import BUDGETS_S, NO_GPU


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=BUDGETS_S)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(argv)
    faulthandler.enable()
    end_s = time.monotonic() + options.seconds
    results = Results(options.out, lambda text: _say(options.name, text), end_s)
    logging.getLogger().addHandler(_Notes(results))
    try:
        return _run(options, results)
    except Exception as exc:
        traceback.print_exc()
        results.fail(options.name, exc)
        return 1


class _Notes(logging.Handler):
    """Keeps warnings in the stage's log: what the loader or transformers did without."""

    def __init__(self, results: Results) -> None:
        super().__init__(logging.WARNING)
        self._results = results

    def emit(self, record: logging.LogRecord) -> None:
        self._results.note(record.getMessage().strip())


def _run(options: argparse.Namespace, results: Results) -> int:
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        _say(options.name, "torch finds no CUDA device here; nothing was checked")
        return NO_GPU
    from bench.gpu_check.machine import Machine
    from bench.gpu_check.plan import PLAN, Stage
    from bench.gpu_check.sizes import FULL, SMALL

    # In all stages, as cuDNN's attention builds a graph for each length of a context.
    torch.backends.cuda.enable_cudnn_sdp(False)
    machine = Machine(torch.device(options.device), options.tiny)
    sizes = SMALL if options.tiny else FULL
    results.put("about", machine.about())
    PLAN[options.name](Stage(machine, sizes, results, options.out.parent))
    return 0


def _say(name: str, text: str) -> None:
    print(f"{name}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
