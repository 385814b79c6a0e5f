"""What the pool needs from the service that runs the workers: ECS (ecs_service.py) or an Auto
Scaling group (scaling_group.py). boto3 blocks, so callers use threads."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Failed:
    """A task or machine that ended because of a worker error; Unix seconds."""

    name: str
    at_s: float


class Workforce(Protocol):
    """Every method raises botocore's ClientError or BotoCoreError."""

    def num_desired(self) -> int:
        """The desired number of workers. Raises LookupError if there is no such service or
        group.
        """

    def resize(self, num: int) -> None:
        """Sets the desired number; protected workers stay."""

    def keep(self, incarnations: Collection[str]) -> None:
        """Protects these live workers from scale-in."""

    def outdated(self, incarnations: Collection[str]) -> set[str]:
        """The live workers that a running deployment replaces."""

    def min_healthy_share(self) -> float:
        """The share of the desired workers that a deployment keeps, 0 to 1."""

    def failed(self) -> list[Failed]:
        """Workers that ended with an error recently."""

    def healthy(self) -> list[str]:
        """Names of healthy workers."""
