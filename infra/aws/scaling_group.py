"""An Auto Scaling group of machines, each of which runs one worker by itself, under systemd say.

A machine is told by its worker's name, which begins with the host's: the launch template must name
hosts by instance (`HostnameType: resource-name`). The machines themselves need no right for this.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from infra.aws.workforce import Failed

_MAX_PROTECTED = 50  # of one call
_MAX_ACTIVITIES = 100
_ENDED = re.compile(r"Terminating EC2 instance: (i-[0-9a-f]+)")
# By `aws autoscaling set-instance-health`; EC2's own checks fail for reasons that are not ours.
_BY_ITS_WORKER = "user health-check"


@dataclass(frozen=True, slots=True)
class ScalingGroup:
    """One group. Every method raises botocore's ClientError or BotoCoreError."""

    client: Any
    name: str

    def num_desired(self) -> int:
        """The group's desired capacity. Raises LookupError where there is no such group."""
        return int(self._group()["DesiredCapacity"])

    def resize(self, num: int) -> None:
        """Asks for so many machines. The group ends those that are not protected, in time."""
        self.client.set_desired_capacity(
            AutoScalingGroupName=self.name, DesiredCapacity=num, HonorCooldown=False
        )

    def keep(self, incarnations: Collection[str]) -> None:
        """Protects the machines of these workers when the group shrinks, and no others: what still
        starts holds no jobs, and a machine whose worker has left is to go."""
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

    def failed(self) -> list[Failed]:
        """Machines that said of themselves that they cannot work, and were ended for it."""
        listed = self.client.describe_scaling_activities(
            AutoScalingGroupName=self.name, MaxRecords=_MAX_ACTIVITIES
        )
        return [
            Failed(ended[1], activity["StartTime"].timestamp())
            for activity in listed["Activities"]
            if (ended := _ENDED.match(activity.get("Description", "")))
            and _BY_ITS_WORKER in activity["Cause"]
        ]

    def healthy(self) -> list[str]:
        """Those that are protected: their worker was heard of."""
        return [m["InstanceId"] for m in self._in_service() if m["ProtectedFromScaleIn"]]

    def _in_service(self) -> list[dict[str, Any]]:
        """No other may be protected."""
        return [m for m in self._group()["Instances"] if m["LifecycleState"] == "InService"]

    def _group(self) -> dict[str, Any]:
        found = self.client.describe_auto_scaling_groups(AutoScalingGroupNames=[self.name])
        if not found["AutoScalingGroups"]:
            raise LookupError(f"no Auto Scaling group {self.name!r}")
        group: dict[str, Any] = found["AutoScalingGroups"][0]
        return group


def _has_worker(machine: dict[str, Any], incarnations: Collection[str]) -> bool:
    return any(name.startswith(f"{machine['InstanceId']}-") for name in incarnations)
