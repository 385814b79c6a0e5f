"""`python -m bench.gpu_check [--json OUT] [--device cpu --tiny]`; see scripts/gpu-check.

Exit status 0: all checks passed; 1: one failed; 2: there is no GPU.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from infra.tables import write


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--json", metavar="OUT", help="write all figures there")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to try the check itself; needed on a CPU"
    )
    options = parser.parse_args(argv)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu runs the check itself on --tiny sizes, and measures nothing")
    if options.device == "cpu":
        # Triton reads it when it is first imported.
        os.environ["TRITON_INTERPRET"] = "1"
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch finds no CUDA device here; nothing was checked", file=sys.stderr)
        return 2
    from bench.gpu_check.machine import Machine
    from bench.gpu_check.plan import FULL, SMALL, GpuCheck

    machine = Machine(torch.device(options.device), options.tiny)
    sizes = SMALL if options.tiny else FULL
    report = GpuCheck(machine, sizes, lambda text: print(text, file=sys.stderr)).run()
    write(report.as_json(), report.table(), options.json)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
