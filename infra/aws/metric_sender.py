"""Sends metrics to CloudWatch by PutMetricData, for a pool service whose log is not read by
CloudWatch."""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

EVERY_S = 60.0  # alarms check once a minute; every call costs
_MAX_OF_ONE_CALL = 500  # per call; CloudWatch accepts 1,000, and 1 MB


@dataclass(slots=True)
class MetricSender:
    """Collects lines in CloudWatch's embedded format and sends their values periodically."""

    client: Any
    clock_s: Callable[[], float] = time.time
    _waiting: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by namespace
    _sent_s: float = float("-inf")

    def __call__(self, line: str) -> None:
        """Raises botocore's ClientError or BotoCoreError; unsent values are then lost."""
        for namespace, datum in data_of(line):
            self._waiting.setdefault(namespace, []).append(datum)
        if self.clock_s() - self._sent_s < EVERY_S:
            return
        self._sent_s = self.clock_s()
        waiting, self._waiting = self._waiting, {}
        for namespace, data in waiting.items():
            for start in range(0, len(data), _MAX_OF_ONE_CALL):
                some = data[start : start + _MAX_OF_ONE_CALL]
                self.client.put_metric_data(Namespace=namespace, MetricData=some)


def data_of(line: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The metrics that a line declares, with their namespaces."""
    record = json.loads(line)
    for about in record["_aws"]["CloudWatchMetrics"]:
        for names in about["Dimensions"]:
            dimensions = [{"Name": name, "Value": record[name]} for name in names]
            for metric in about["Metrics"]:
                value = record[metric["Name"]]
                datum = {
                    "MetricName": metric["Name"],
                    "Unit": metric["Unit"],
                    "Timestamp": record["_aws"]["Timestamp"] / 1000,
                    "Dimensions": dimensions,
                    "Values": value if isinstance(value, list) else [value],
                }
                yield about["Namespace"], datum
