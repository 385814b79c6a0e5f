"""Results of each class of step, and advice. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

_NEAR = 0.5  # share of the best possible from which memory or compute limits a step
_LARGE_GAP = 0.25


class Bound(StrEnum):
    """What limits a class of steps."""

    MEMORY = "memory"
    COMPUTE = "compute"
    OVERHEAD = "overhead"  # neither: small operations, launches, Python


@dataclass(frozen=True, slots=True)
class Operator:
    """One kind of operation, with its share of all operators' time."""

    name: str
    self_us: float
    share: float
    num_calls: int


@dataclass(frozen=True, slots=True)
class ClassFinding:
    """Steps of one class; means unless stated otherwise. Seconds.

    `memory_s`, `compute_s`: lower bounds of reading and computing on this machine. `outside_s`:
    part of a step before and after the model: scheduling, bookkeeping. `gap_share`: share of the
    profiled time without an operator on the device.
    """

    kind: str
    num_steps: int
    num_tokens: float
    num_seqs: float
    step_s: float
    p99_s: float
    model_s: float
    outside_s: float
    memory_s: float
    compute_s: float
    gap_share: float
    operators: tuple[Operator, ...]

    @property
    def bound(self) -> Bound:
        if max(self.memory_s, self.compute_s) < _NEAR * self.model_s:
            return Bound.OVERHEAD
        return Bound.MEMORY if self.memory_s > self.compute_s else Bound.COMPUTE

    @property
    def efficiency(self) -> float:
        """The lower bound relative to the model's time; 1 is the best possible."""
        return min(1.0, max(self.memory_s, self.compute_s) / self.model_s)


def advice(findings: tuple[ClassFinding, ...], is_gpu: bool) -> str:
    """One paragraph: what limits this engine, and which setting helps."""
    by_kind = {finding.kind: finding for finding in findings}
    mixed, decode = by_kind["mixed"], by_kind["decode"]
    sentences = [_of_decode(decode, is_gpu), _of_prefill(by_kind["prefill"])]
    if mixed.step_s > 2 * decode.step_s:
        sentences.append(
            f"A step that also computes prompts takes {mixed.step_s / decode.step_s:.1f} times as "
            "long as one of decoding alone, so tokens arrive later: lower "
            "--max-num-batched-tokens, or set prefill_share, where time between tokens matters "
            "more than the first token."
        )
    outside = max(findings, key=lambda finding: finding.outside_s / finding.step_s)
    if outside.outside_s > _LARGE_GAP * outside.step_s:
        sentences.append(
            f"{outside.outside_s / outside.step_s:.0%} of a {outside.kind} step passes outside of "
            "the model, in scheduling and bookkeeping: larger batches spread it over more tokens."
        )
    return " ".join(sentences)


def _of_decode(finding: ClassFinding, is_gpu: bool) -> str:
    text = f"Decoding is bound by {finding.bound}, at {finding.efficiency:.0%} of the roof. "
    match finding.bound:
        case Bound.MEMORY:
            return text + (
                "Each step reads all weights for one token of each stream, so more streams are "
                "nearly free: raise --max-num-seqs as far as KV memory and the time between "
                "tokens allow; a smaller --dtype makes each step shorter."
            )
        case Bound.COMPUTE:
            return text + (
                "More streams make each step longer without more tokens per second: "
                "--max-num-seqs is high enough. A faster device or a smaller model helps."
            )
    if finding.gap_share > _LARGE_GAP:
        waits = "the device waits for the host" if is_gpu else "Python runs between operators"
        return text + (
            f"In {finding.gap_share:.0%} of the time no operator ran: {waits}. More streams in a "
            "step are nearly free then: raise --max-num-seqs."
        )
    first = finding.operators[0]
    return text + (
        "Operators run nearly all the time, but at a fraction of what large ones reach here; "
        f"{first.name} takes {first.share:.0%} of it. More streams make its products larger, so "
        "raise --max-num-seqs while a step stays short enough for the time between tokens."
    )


def _of_prefill(finding: ClassFinding) -> str:
    text = f"Prefill is bound by {finding.bound}, at {finding.efficiency:.0%} of the roof"
    if finding.bound is Bound.COMPUTE:
        return text + ", the best case; only fewer prompt tokens help, through the prefix cache."
    return text + ": longer chunks would use the device better, by --max-num-batched-tokens."
