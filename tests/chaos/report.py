"""The report of a campaign: its figures, and what broke a promise."""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.campaigns.command_line import as_table
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

    @property
    def is_clean(self) -> bool:
        return not self.ledger.violations

    @property
    def violations(self) -> list[str]:
        return [f"{v.kind}: {v.story}: {v.detail}" for v in self.ledger.violations]

    def figures(self) -> dict[str, Any]:
        ledger = self.ledger
        options = self.options
        return {
            "num_faults": self.faults.total(),
            "seed": options.seed,
            "model": options.model,
            "fsync": options.fsync,
            "partitions at the start": options.fleet.num_partitions or 1,
            "replicas are awaited": options.fleet.awaits,
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
        }

    def as_table(self) -> str:
        return as_table({**self.figures(), "violations": self.violations})
