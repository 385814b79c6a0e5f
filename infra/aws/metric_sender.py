"""Sends metrics to CloudWatch by PutMetricData, where no reader of logs makes them of lines: for a
pool service that does not run on ECS or Lambda.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

EVERY_S = 60.0  # alarms look once a minute; every call costs
_MAX_OF_ONE_CALL = 500  # CloudWatch takes 1,000, and 1 MB


@dataclass(slots=True)
class MetricSender:
    """Takes lines in CloudWatch's embedded format, and sends what they say at its time."""

    client: Any
    clock_s: Callable[[], float] = time.time
    _waiting: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by namespace
    _sent_s: float = float("-inf")

    def __call__(self, line: str) -> None:
        """Raises botocore's ClientError or BotoCoreError; what was to be sent is then lost, and
        the next lines say how things stand."""
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
    """The metrics that a line declares, each with its namespace."""
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
