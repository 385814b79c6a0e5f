"""SQS and Lambda's asynchronous invocations on a virtual clock, with template.yaml's numbers.

By Lambda's developer guide: an asynchronous invocation that fails is tried again after one and then
two minutes, and goes to its destination; SQS shows a failed message again after its visibility
timeout, and moves it after `maxReceiveCount`.
"""

import heapq
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

from tests.aws.lambda_events import given_up, sqs_event
from tests.aws.template import of_type

RETRIES_AFTER_S = (60.0, 120.0)


class Context:
    def __init__(self, invocation_id: str) -> None:
        self.aws_request_id = invocation_id


class Deliveries:
    """Delivers events until they are handled or lost. `moved`: messages that SQS moved to the
    dead letters by itself."""

    def __init__(self, invoke: Callable[..., Any]) -> None:
        self.now_s = 0.0
        self.num_invocations = 0
        self.moved: list[str] = []
        self._invoke = invoke
        self._heap: list[tuple[float, int, Callable[[], Awaitable[None]]]] = []
        self._order = itertools.count()
        queue = of_type("AWS::SQS::Queue")["IntakeQueue"]
        self._visible_after_s = queue["VisibilityTimeout"]
        self._max_receives = queue["RedrivePolicy"]["maxReceiveCount"]
        self._kept_s = queue["MessageRetentionPeriod"]
        [self._asynchronous] = of_type("AWS::Lambda::EventInvokeConfig").values()

    def message(
        self, message_id: str, body: str, *, sent_s: float = 0.0, received: int = 1
    ) -> None:
        """A message of SQS is to be received."""

        async def receive() -> None:
            if received > self._max_receives or self.now_s - sent_s > self._kept_s:
                self.moved.append(message_id)
                return
            event = sqs_event((message_id, body))
            event["Records"][0]["attributes"]["ApproximateReceiveCount"] = str(received)
            self.num_invocations += 1
            answer = await self._invoke(event)
            if answer["batchItemFailures"]:
                later = received + 1
                self._at(
                    self.now_s + self._visible_after_s,
                    lambda: self.message(message_id, body, sent_s=sent_s, received=later),
                )

        self._push(self.now_s, receive)

    def event(self, invocation_id: str, event: dict[str, Any], *, attempt: int = 0) -> None:
        """An event is to be handled by an asynchronous invocation."""

        async def handle() -> None:
            self.num_invocations += 1
            try:
                await self._invoke(event, Context(invocation_id))
            except Exception:
                tries = self._asynchronous["MaximumRetryAttempts"]
                if attempt < tries:
                    self._at(
                        self.now_s + RETRIES_AFTER_S[attempt],
                        lambda: self.event(invocation_id, event, attempt=attempt + 1),
                    )
                    return
                [arn] = self._asynchronous["DestinationConfig"]["OnFailure"].values()
                assert arn == {"Fn::GetAtt": ["IntakeQueue", "Arn"]}
                record = json.dumps(given_up(event, invocation_id))
                self.message(f"given-up-{invocation_id}", record, sent_s=self.now_s)

        self._push(self.now_s, handle)

    async def run(self, until_s: float) -> None:
        """Delivers what is due until then."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, deliver = heapq.heappop(self._heap)
            await deliver()
        self.now_s = until_s

    @property
    def num_waiting(self) -> int:
        return len(self._heap)

    def _at(self, due_s: float, schedule: Callable[[], None]) -> None:
        async def then() -> None:
            schedule()

        self._push(due_s, then)

    def _push(self, due_s: float, deliver: Callable[[], Awaitable[None]]) -> None:
        heapq.heappush(self._heap, (due_s, next(self._order), deliver))
