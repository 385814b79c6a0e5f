"""The results of a check, as a table and as JSON."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from bench.gpu_check.checks import Check
from bench.gpu_check.comparison import Closed, Loaded
from bench.gpu_check.machine import Machine, Roofs
from bench.gpu_check.timings import Decoding, Prefill


@dataclass(slots=True)
class Report:
    """Filled in during the check."""

    machine: Machine
    roofs: Roofs
    checks: list[Check] = field(default_factory=list)
    decoding: dict[str, list[Decoding]] = field(default_factory=dict)
    prefill: dict[str, Prefill] = field(default_factory=dict)
    closed: dict[str, Closed] = field(default_factory=dict)
    loaded: dict[str, list[Loaded]] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """Seconds, bytes, operations and tokens per second; shares of one."""
        found = dataclasses.asdict(self)
        del found["machine"]
        about = {"device": self.machine.name, "versions": self.machine.versions()}
        return about | {"passed": self.passed} | found

    def table(self) -> str:
        versions = ", ".join(f"{name} {text}" for name, text in self.machine.versions().items())
        lines = [
            f"{self.machine.name}: {versions}",
            _row("copy", f"{self.roofs.bytes_per_s / 1e12:.2f} TB/s", "read and written"),
            _row("matrix product", f"{self.roofs.flops / 1e12:.0f} TFLOP/s", "random data"),
        ]
        lines += [
            _row(check.name, "ok" if check.passed else "FAILED", check.detail)
            for check in self.checks
        ]
        for name, rows in self.decoding.items():
            lines += [_decoding_line(name, row) for row in rows]
        for name, prefill in self.prefill.items():
            lines.append(
                _row(
                    f"{name}: prefill, {prefill.num_tokens} tokens",
                    f"{prefill.tokens_per_s:,.0f} tok/s",
                    f"{prefill.flops_share:.0%} of the matrix rate",
                )
            )
        for name, closed in self.closed.items():
            lines.append(_closed_line(name, closed))
        for name, loads in self.loaded.items():
            lines += [_loaded_line(name, load) for load in loads]
        lines += [_row("skipped", "", reason) for reason in self.skipped]
        return "\n".join(lines)


def _row(what: str, figure: str, detail: str) -> str:
    return f"{what:<48}{figure:>16}  {detail}"


def _decoding_line(name: str, row: Decoding) -> str:
    what = f"{name}: decode, {row.num_streams} streams"
    if row.tokens_per_s is None:
        return _row(what, "", "the KV does not fit")
    return _row(
        what,
        f"{row.tokens_per_s:,.0f} tok/s",
        f"{row.bandwidth_share:.0%} of the copy's bytes, {row.flops_share:.0%} of the matrix "
        f"rate, host gap {row.host_gap_share:.1%}",
    )


def _closed_line(name: str, closed: Closed) -> str:
    what = f"{name}: {closed.num_requests} requests at once"
    if closed.transformers is None:
        return _row(what, f"{closed.ours:,.0f} tok/s", f"transformers: {closed.reason}")
    ratio = closed.ours / closed.transformers
    beside = f"transformers {closed.transformers:,.0f} tok/s, ratio {ratio:.2f}"
    return _row(what, f"{closed.ours:,.0f} tok/s", beside)


def _loaded_line(name: str, load: Loaded) -> str:
    return _row(
        f"{name}: {load.strategy}, {load.requests_per_s:g} requests/s",
        f"{load.output_tokens_per_s:,.0f} tok/s",
        f"p50 {load.p50_s:.2f} s, p99 {load.p99_s:.2f} s of {load.num_requests} requests",
    )
