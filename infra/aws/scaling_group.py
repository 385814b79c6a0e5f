"""An Auto Scaling group of machines that each run one worker, for example under systemd.

A machine is matched to its worker by host name: the launch template must name hosts by instance
(`HostnameType: resource-name`). The machines need no permissions for this.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from infra.aws.workforce import Failed

_MAX_PROTECTED = 50  # per call
_MAX_ACTIVITIES = 100
_ENDED = re.compile(r"Terminating EC2 instance: (i-[0-9a-f]+)")
# Set by `aws autoscaling set-instance-health`; EC2's own checks fail for other reasons.
_REPORTED_BY_WORKER = "user health-check"


@dataclass(frozen=True, slots=True)
class ScalingGroup:
    """One group. Every method raises botocore's ClientError or BotoCoreError."""

    client: Any
    name: str

    def num_desired(self) -> int:
        """The group's desired capacity. Raises LookupError if there is no such group."""
        return int(self._group()["DesiredCapacity"])

    def resize(self, num: int) -> None:
        """Sets the desired capacity. The group ends unprotected machines in time."""
        self.client.set_desired_capacity(
            AutoScalingGroupName=self.name, DesiredCapacity=num, HonorCooldown=False
        )

    def keep(self, incarnations: Collection[str]) -> None:
        """Protects only the machines of these workers from scale-in: starting machines hold no
        jobs, and a machine whose worker has left should end."""
        machines = self._in_service()
        for is_kept in (True, False):
            changed = [
                machine["InstanceId"]
                for machine in machines
                if _has_worker(machine, incarnations) is is_kept
                and machine["ProtectedFromScaleIn"] is not is_kept
            ]
            for start in range(0, len(changed), _MAX_PROTECTED):
                self.client.set_instance_protection(
                    AutoScalingGroupName=self.name,
                    InstanceIds=changed[start : start + _MAX_PROTECTED],
                    ProtectedFromScaleIn=is_kept,
                )

    def outdated(self, incarnations: Collection[str]) -> set[str]:
        """Returns none: an instance refresh of the group replaces machines by itself."""
        return set()

    def min_healthy_share(self) -> float:
        return 1.0

    def failed(self) -> list[Failed]:
        """Machines that reported themselves unhealthy and were ended."""
        listed = self.client.describe_scaling_activities(
            AutoScalingGroupName=self.name, MaxRecords=_MAX_ACTIVITIES
        )
        return [
            Failed(ended[1], activity["StartTime"].timestamp())
            for activity in listed["Activities"]
            if (ended := _ENDED.match(activity.get("Description", "")))
            and _REPORTED_BY_WORKER in activity["Cause"]
        ]

    def healthy(self) -> list[str]:
        """Returns the protected machines, whose workers send heartbeats."""
        return [m["InstanceId"] for m in self._in_service() if m["ProtectedFromScaleIn"]]

    def _in_service(self) -> list[dict[str, Any]]:
        """Returns the machines in service, as others cannot be protected."""
        return [m for m in self._group()["Instances"] if m["LifecycleState"] == "InService"]

    def _group(self) -> dict[str, Any]:
        found = self.client.describe_auto_scaling_groups(AutoScalingGroupNames=[self.name])
        if not found["AutoScalingGroups"]:
            raise LookupError(f"no Auto Scaling group {self.name!r}")
        group: dict[str, Any] = found["AutoScalingGroups"][0]
        return group


def _has_worker(machine: dict[str, Any], incarnations: Collection[str]) -> bool:
    return any(name.startswith(f"{machine['InstanceId']}-") for name in incarnations)
