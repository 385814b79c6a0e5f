"""Compares our engine with others on one workload: `python -m bench.peers --help`."""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.models import SIZES, R, chat_workload, make_model
from infra.measure.workloads import log_uniform_workload
from infra.tables import write
from workers.model.machine import available_cores

_ROOT = Path(__file__).resolve().parent.parent.parent
OURS = "batchway"
ADAPTERS = {
    "transformers": "transformers_batching",
    "vllm": "vllm_engine",
    "openvino": "openvino_genai",
    "llama.cpp": "llama_cpp",
}
# What an engine computes in, if not in all of them. int8: weights of a byte, or of less.
_DTYPES = {
    "transformers": ("float32", "bfloat16"),
    "vllm": ("float32", "bfloat16"),
    "llama.cpp": ("int8",),
}
_ALL_DTYPES = ("float32", "bfloat16", "int8")
_ANSWER_TOKENS = 128  # of each of R's chats
_NUM_REQUESTS = 64
_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True)
class Column:
    """A model size in one element type, beside some busy processes; of R, the chats at once."""

    size: str
    dtype: str
    company: int = 0
    chats: int = 0

    @property
    def workload(self) -> str:
        return f"{self.size}-{self.chats}.json" if self.chats else f"{self.size}.json"

    def __str__(self) -> str:
        beside = f" beside {self.company} busy processes" if self.company else ""
        return f"{self.size} {self.dtype}{f', {self.chats} chats' * bool(self.chats)}{beside}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all engines alternately, several times; prints medians; returns the exit status."""
    options = _parser().parse_args(arguments)
    pythons = {OURS: Path(sys.executable)} | dict(options.peer)
    columns = [
        Column(*each, chats)
        for each in product(options.sizes, options.dtypes, options.company)
        for chats in (options.chats if each[0] == R else [0])
    ]
    options.folder.mkdir(parents=True, exist_ok=True)
    for column in columns:
        _prepare(column, options.folder)
    results: dict[Column, dict[str, list[dict[str, Any]]]] = {c: {} for c in columns}
    for run in range(1, options.runs + 1):
        for column in columns:
            for name, python in pythons.items():
                if column.dtype not in _DTYPES.get(name, _ALL_DTYPES):
                    continue
                print(f"run {run}, {column}: {name}", file=sys.stderr)
                with busy_processes(column.company):
                    found = measure(name, python, column, options)
                results[column].setdefault(name, []).append(found)
    summaries = {c: summarise(found) for c, found in results.items()}
    shown = [asdict(column) | {"engines": found} for column, found in summaries.items()]
    write(shown, tables(summaries), options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="for models and workloads")
    parser.add_argument(
        "--peer",
        type=_peer,
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help=f"{', '.join(ADAPTERS)}, with the Python of the environment that it is installed in",
    )
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, R], default=list(SIZES))
    parser.add_argument("--dtypes", nargs="+", choices=_ALL_DTYPES, default=["float32", "bfloat16"])
    parser.add_argument(
        "--chats", nargs="+", type=int, default=[1, 8, 32], help="of R, all at once"
    )
    parser.add_argument(
        "--company", nargs="+", type=int, default=[0], help="busy processes beside each engine"
    )
    parser.add_argument("--runs", type=int, default=3, help="of each engine, in turns")
    parser.add_argument("--max-running", type=int, default=32, help="sequences at once")
    parser.add_argument("--threads", type=int, default=available_cores(), help="of each engine")
    parser.add_argument("--json", metavar="OUT")
    return parser


def _peer(text: str) -> tuple[str, Path]:
    name, _, python = text.partition("=")
    if name not in ADAPTERS or not Path(python).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not NAME=PYTHON of {', '.join(ADAPTERS)}")
    return name, Path(python)


def _prepare(column: Column, folder: Path) -> None:
    """Writes the model and its workload, the same at each call."""
    model = folder / column.size
    if not (model / "config.json").exists():
        make_model(column.size, model)
    if column.chats:
        workload = chat_workload(model, column.chats, _ANSWER_TOKENS)
    else:
        workload = log_uniform_workload(_NUM_REQUESTS, SIZES[column.size]["vocab_size"])
    (folder / column.workload).write_bytes(msgspec.json.encode(workload))


def measure(name: str, python: Path, column: Column, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one engine once in its own process. Raises CalledProcessError."""
    program, dtype = ["infra", "bench", "engine"], [f"--dtype={column.dtype}"]
    if name != OURS:
        program = [f"bench.peers.adapters.{ADAPTERS[name]}"]
    elif column.dtype == "int8":
        dtype = ["--dtype=float32", "--quantization=int8"]
    with tempfile.TemporaryDirectory() as scratch:
        found = Path(scratch) / "found.json"
        subprocess.run(  # noqa: S603 - the operator's own environments
            [
                str(python),
                "-m",
                *program,
                f"--model={options.folder / column.size}",
                f"--workload={options.folder / column.workload}",
                *dtype,
                f"--max-running={options.max_running}",
                f"--json={found}",
            ],
            cwd=_ROOT,
            env=os.environ | {"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": str(_ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=True,
        )
        read: dict[str, Any] = json.loads(found.read_text())
    return read


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Starts processes that compute without end; they end by themselves if this one is killed."""
    program = (
        f"import time\nend = time.monotonic() + {_TIMEOUT_S}\nwhile time.monotonic() < end: pass"
    )
    with contextlib.ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-c", program])  # noqa: S603
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def summarise(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Returns by engine: medians over its runs, and the number of outputs equal to our engine's."""
    ours = runs[OURS][0]["outputs"]
    found = {}
    for name, engine_runs in runs.items():
        found[name] = {
            "output_tokens_per_s": median(run["output_tokens_per_s"] for run in engine_runs),
            "runs": [run["output_tokens_per_s"] for run in engine_runs],
            "ttft_p50_s": median(run["ttft_s"]["p50"] for run in engine_runs),
            "ttft_p99_s": median(run["ttft_s"]["p99"] for run in engine_runs),
            "itl_p99_s": median(run["itl_s"]["p99"] for run in engine_runs),
            "same_outputs": sum(
                a == b for a, b in zip(ours, engine_runs[0]["outputs"], strict=True)
            ),
            "num_outputs": len(ours),
        }
    return found


def tables(summaries: Mapping[Column, Mapping[str, Mapping[str, Any]]]) -> str:
    """Returns separate tables of throughput and latencies for each column."""
    lines = []
    for column, engines in summaries.items():
        best = engines[OURS]["output_tokens_per_s"]
        lines += ["", str(column)]
        lines.append(f"{'':14}{'tokens/s':>10}{'ours / it':>12}{'same outputs':>15}")
        for name, row in engines.items():
            speed = row["output_tokens_per_s"]
            same = f"{row['same_outputs']} of {row['num_outputs']}"
            lines.append(f"{name:14}{speed:>10.0f}{best / speed:>12.2f}{same:>15}")
        lines.append(f"{'ms':14}{'first token':>14}{'p99':>10}{'between, p99':>15}")
        for name, row in engines.items():
            first, late = 1000 * row["ttft_p50_s"], 1000 * row["ttft_p99_s"]
            lines.append(f"{name:14}{first:>14.0f}{late:>10.0f}{1000 * row['itl_p99_s']:>15.1f}")
    return "\n".join(lines).strip("\n")


if __name__ == "__main__":
    sys.exit(main())
