"""What was found, in one JSON file and one page of tables, written again after each figure."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.tables import markdown_table

NO_GPU = 2  # an exit status
Figures = Mapping[str, Any]  # of a stage
_VERSIONS = ("torch", "cuda", "transformers", "vllm")


class NotAvailable(Exception):
    """A server refuses what a stage asks for. The message is its reason."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one comparison."""

    passed: bool
    detail: str


def embedder_of(folder: Path) -> Path:
    """Where the model of embeddings is, beside the other."""
    return folder.with_name(f"{folder.name}.embeddings")


class Record:
    """Figures by stage. `end_s`: when the time is over, by the clock."""

    def __init__(
        self, folder: Path, end_s: float, *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._end_s = end_s
        self._clock_s = clock_s
        self.stages: dict[str, dict[str, Any]] = {}

    @property
    def left_s(self) -> float:
        return max(0.0, self._end_s - self._clock_s())

    def put(self, stage: str, **figures: Any) -> None:
        """Adds to a stage: dicts are merged, lists continued, other values replaced."""
        _merge(self.stages.setdefault(stage, {}), figures)
        (self._folder / "gpu-check.json").write_text(json.dumps(self.stages, indent=1) + "\n")
        (self._folder / "gpu-check.md").write_text(report(self.stages))

    def check(self, stage: str, name: str, finding: Finding) -> None:
        self.put(stage, checks=[{"name": name, **asdict(finding)}])

    def not_available(self, stage: str, reason: str) -> None:
        """Says that a stage cannot be measured here, which is no failure."""
        print(f"{stage}: not available: {reason}", file=sys.stderr, flush=True)
        self.put(stage, state="not available", reason=reason)

    def run(
        self, stage: str, needs_s: float, work: Callable[[], None], *, later_s: float = 0.0
    ) -> None:
        """Runs a stage and records how it ended. Skips it if it does not fit: it takes about
        `needs_s`, and what is more important and comes later `later_s`."""
        left_s = self.left_s
        if left_s < needs_s + later_s:
            kept = f" besides {later_s:.0f} s for later stages" if later_s else ""
            reason = f"needs about {needs_s:.0f} s{kept}; {left_s:.0f} s are left"
            self.put(stage, state="skipped", reason=reason)
            return
        print(f"{stage}: starts, {left_s:.0f} s are left", file=sys.stderr, flush=True)
        self.put(stage, state="interrupted")
        start_s = self._clock_s()
        state, reason = "done", ""
        try:
            work()
        except TimeoutError:
            state, reason = "cut short", "the time was over"
        except NotAvailable as exc:
            state, reason = "not available", str(exc)
            self.not_available(stage, reason)
        except Exception as exc:  # the other stages go on
            state, reason = "failed", f"{type(exc).__name__}: {exc}"
        self.put(stage, state=state, reason=reason, seconds=round(self._clock_s() - start_s, 1))

    def has_passed(self) -> bool:
        """Whether no stage failed, and no check."""
        return all(
            found.get("state") != "failed" and all(c["passed"] for c in found.get("checks", ()))
            for found in self.stages.values()
        )


def _merge(into: dict[str, Any], figures: Figures) -> None:
    for name, value in figures.items():
        if isinstance(value, dict):
            _merge(into.setdefault(name, {}), value)
        elif isinstance(value, list):
            into[name] = [*into.get(name, ()), *value]
        else:
            into[name] = value


def report(stages: Mapping[str, Figures]) -> str:
    """Returns the figures as Markdown. What has not run yet is left out."""
    checks = [check for found in stages.values() for check in found.get("checks", ())]
    failed = [f"- {c['name']} FAILED: {c['detail']}" for c in checks if not c["passed"]]
    told = [c for c in checks if c["passed"]]
    counted = f"{len(checks) - len(failed)} of {len(checks)} checks passed."
    loads = [["engine, over HTTP", "streams", "output tokens/s", "first token, ms, p50"]]
    loads[0] += ["time per output token, ms, p50", "GPU's utilisation, %, median"]
    beside = [["streams", "output tokens/s, share of vllm serve", "first token, times", "rounds"]]
    beside += [[n, *each] for n, each in stages.get("beside", {}).get("shares", {}).items()]
    ends = [["stage", "ended", "seconds", "start, s", "reason"]]
    for name, figures in stages.items():
        loads += [[name, *_load(*each)] for each in figures.get("loads", {}).items()]
        if "state" not in figures:
            continue
        reason = figures.get("reason", "").replace("|", " ").replace("\n", " ")
        end = [figures.get(key, "") for key in ("state", "seconds", "start_s")]
        ends.append([name, *map(str, end), reason])
    parts = [
        _about(stages.get("machine", {})),
        *([markdown_table(loads)] if len(loads) > 1 else []),
        *([markdown_table(beside)] if len(beside) > 1 else []),
        *(f"{name}: {text}" for name, found in stages.items() for text in found.get("told", ())),
        "\n".join([counted, *failed, *(f"- {c['name']}: {c['detail']}" for c in told)]),
        markdown_table(ends),
    ]
    return "\n\n".join(parts) + "\n"


def _about(machine: Figures) -> str:
    about = machine.get("about", {})
    line = f"{about.get('device', 'no device')}: "
    line += ", ".join(f"{name} {about[name]}" for name in _VERSIONS if name in about)
    if roofs := machine.get("roofs"):
        copy, product = roofs["bytes_per_s"] / 1e12, roofs["flops_per_s"] / 1e12
        line += f". Memory {copy:.2f} TB/s, matrix product {product:.0f} TFLOP/s"
    if model := machine.get("model"):
        line += f". {model['name']}, random weights, untied, {machine['num_in']} tokens in, "
        line += f"{machine['num_out']} out"
    return f"{line}."


def _load(streams: str, load: Figures) -> list[str]:
    used = load["utilisation"]
    return [
        streams,
        f"{load['tokens_per_s']:,.0f}",
        f"{1000 * load['first_token_s']:,.1f}",
        f"{1000 * load['per_token_s']:,.2f}",
        f"{statistics.median(used):.0f}" if used else "not known",
    ]
