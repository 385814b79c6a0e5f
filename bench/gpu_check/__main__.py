"""`python -m bench.gpu_check [--out FOLDER] [--device cpu --tiny]`; see scripts/gpu-check.

Exit status 0: all checks passed; 1: one failed, or a stage did; 2: there is no GPU.
"""

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_check import wheels
from bench.gpu_check.report import has_passed, report
from bench.gpu_check.stages import NO_GPU, read_figures, run_stages

_DEFAULT_FOLDER = wheels.ROOT / "build" / "gpu-check"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=_DEFAULT_FOLDER,
        help="a JSON file of each stage, and report.md (default: build/gpu-check)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="small sizes, to try the check itself; needed on a CPU"
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
    arguments = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    return _check(options.out.resolve(), arguments, is_cpu=options.device == "cpu")


def _check(folder: Path, arguments: Sequence[str], *, is_cpu: bool) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as unpacked:
        environment = dict(os.environ)
        if wheels.missing():
            wheels.unpack(Path(unpacked))
            paths = [unpacked, environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if is_cpu:
            environment["TRITON_INTERPRET"] = "1"

        def write() -> None:
            """After each stage: a command that is cut short has a report too. What it cannot read
            must not cost the next stages."""
            try:
                (folder / "report.md").write_text(report(dict(read_figures(folder))))
            except Exception:
                traceback.print_exc()

        if not run_stages(folder, arguments, environment, write):
            return NO_GPU
    figures = dict(read_figures(folder))
    print(report(figures))
    return 0 if has_passed(figures) else 1


if __name__ == "__main__":
    sys.exit(main())
