"""`python -m bench.gpu_check [--out FOLDER] [--device cpu --tiny]`; see scripts/gpu-check.

Exit status 0: all checks passed; 1: one failed, or a stage did; 2: there is no GPU.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_check import wheels

NO_GPU = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=wheels.ROOT / "build" / "gpu-check",
        help="gpu-check.json, gpu-check.md, and the servers' logs (default: build/gpu-check)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to try the check itself; needed on a CPU"
    )
    parser.add_argument(
        "--budget-s", type=float, default=540.0, help="of all stages (default: %(default).0f)"
    )
    parser.add_argument(
        "--start-s", type=float, default=240.0, help="of a server's start (default: %(default).0f)"
    )
    parser.add_argument(
        "--carry",
        metavar="PYTHON",
        help="only download the wheels that a machine without a network lacks, for this version "
        "of Python, such as 3.12, into .wheels",
    )
    options = parser.parse_args(argv)
    if options.carry is not None:
        return wheels.download(options.carry)
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu runs the check itself on --tiny sizes, and measures nothing")
    end_s = time.monotonic() + options.budget_s
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as folder:
        if wheels.missing():
            unpacked = Path(folder) / "site"
            wheels.unpack(unpacked)
            sys.path.insert(0, str(unpacked))
            paths = [str(unpacked), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        from bench.gpu_check.plan import Plan
        from bench.gpu_check.record import Record
        from bench.gpu_check.report import report

        out = options.out.resolve()
        out.mkdir(parents=True, exist_ok=True)
        for path in (*out.glob("gpu-check.*"), *out.glob("*.log")):
            path.unlink()
        record = Record(out, end_s)
        plan = Plan(
            record, out, Path(folder) / "model", options.device, options.tiny, options.start_s
        )
        try:
            if not plan.run():
                print("gpu-check: torch finds no CUDA device here", file=sys.stderr)
                return NO_GPU
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    print(report(record.stages))
    return 0 if record.has_passed() else 1


if __name__ == "__main__":
    sys.exit(main())
