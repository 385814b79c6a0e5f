"""The report of a campaign, as a table and as JSON."""

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tests.chaos.ledger import Ledger

if TYPE_CHECKING:
    from tests.chaos.campaign import CampaignOptions


@dataclass
class Report:
    """The figures of one run."""

    options: "CampaignOptions"
    faults: Counter[str]
    num_bytes_lost: int
    ledger: Ledger
    started_s: float

    def __post_init__(self) -> None:
        self.took_s = time.monotonic() - self.started_s

    @property
    def is_clean(self) -> bool:
        return not self.ledger.violations

    def as_json(self) -> dict[str, Any]:
        ledger = self.ledger
        options = self.options
        return {
            "num_faults": self.faults.total(),
            "seed": options.seed,
            "model": options.model,
            "fsync": options.fsync,
            "partitions at the start": options.fleet.num_partitions or 1,
            "replicas are awaited": options.fleet.awaits,
            "took_s": round(self.took_s, 1),
            "jobs": len(ledger.stories_by_job),
            "tokens": ledger.num_tokens,
            "callbacks": ledger.num_callbacks,
            "callback_deliveries": ledger.num_deliveries,
            **ledger.by_kind(),
            "longest_stall_s": round(ledger.longest_stall_s, 1),
            "rolled_back": ledger.num_rolled_back,
            "stream_resets": ledger.num_resets,
            "near_ties": ledger.num_near_ties,
            "bytes_lost_in_cuts": self.num_bytes_lost,
            "faults": dict(sorted(self.faults.items())),
            "clients": dict(sorted(ledger.counts.items())),
            "violations": [asdict(violation) for violation in ledger.violations],
        }

    def as_table(self) -> str:
        rows = self.as_json()
        nested = ("faults", "clients", "violations")
        lines = [_line(name, value) for name, value in rows.items() if name not in nested]
        for part in nested[:2]:
            lines += ["", part, *(_line(f"  {name}", value) for name, value in rows[part].items())]
        if self.ledger.violations:
            lines += ["", "violations"]
            lines += [f"  {v.kind}: {v.story}: {v.detail}" for v in self.ledger.violations[:50]]
        return "\n".join(lines)


def _line(name: str, value: object) -> str:
    return f"{name.replace('_', ' '):<44} {value:>12}"
