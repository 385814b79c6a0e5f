"""What the pool asks of whoever runs the workers: ECS (ecs_service.py), or a group of machines that
run them by themselves (scaling_group.py). boto3 is slow and blocks, so that callers use threads.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Failed:
    """A task or a machine that ended because of its worker's error; Unix seconds."""

    name: str
    at_s: float


class Workforce(Protocol):
    """Every method raises botocore's ClientError or BotoCoreError."""

    def num_desired(self) -> int:
        """How many are asked for. Raises LookupError where there is nobody to ask."""

    def resize(self, num: int) -> None:
        """Asks for so many; those that are kept outlive it."""

    def keep(self, incarnations: Collection[str]) -> None:
        """These workers are heard of: a smaller pool must not end them, they go by themselves."""

    def failed(self) -> list[Failed]:
        """Those that ended with an error lately."""

    def healthy(self) -> list[str]:
        """Names of those that run and whose worker was heard of."""
