"""An engine's output is appended to logs at once; its steps are recorded afterwards, one by one."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from contract.connection import end_tasks
from contract.function_types import Append, Claimed, Verdict
from contract.jobs import Endpoint, FinishReason
from tests.fakes import EOS_ID, encode_text, hash_tokenizer
from tests.hash_worker import hash_worker_settings
from tests.workers.held import job_of
from tests.workers.test_room import READY, start
from workers.ipc.messages import EngineLoad, FromEngine, StopChoice, ToEngine, TokenOut
from workers.output.formats import REASONING_FORMATS
from workers.supervisor.engine_keeper import EngineKeeper, Watchdog
from workers.supervisor.held_job import HeldJob, OutputFormats
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.metrics import Meter
from workers.supervisor.publisher import Publisher, ResultKeeper
from workers.supervisor.warming import Warming
from workers.supervisor.worker_broker import make_card

pytestmark = pytest.mark.anyio

JOB = "job"


class Desk:
    """A keeper with its callbacks, and a Redis that accepts each append and records the engine's
    load at that time."""

    def __init__(self) -> None:
        settings = hash_worker_settings("unix:///nowhere")
        lane: Any = self
        self.engine = EngineLink(settings.engine_options(), ready=READY)
        self.holding = Holding(self.engine)
        publisher = Publisher(lane, self.holding, ResultKeeper(None, 0, lane))
        self.meter = Meter()
        warming = Warming(lane, self.holding)
        parts = (settings, lane, self.engine, self.holding, publisher, self.meter, warming)
        self.receive: Callable[[list[FromEngine]], None] = EngineKeeper(*parts)._receive
        self.appended: asyncio.Queue[tuple[Append, EngineLoad]] = asyncio.Queue()
        self._publishing = asyncio.create_task(publisher.run())

    async def append(self, items: Sequence[Append]) -> list[tuple[Verdict, int]]:
        for item in items:
            self.appended.put_nowait((item, self.engine.load))
        return [(Verdict.OK, item.number + 1) for item in items]

    async def aclose(self) -> None:
        await end_tasks(self._publishing)


def load(ended_s: float, num_tokens: int = 1) -> EngineLoad:
    return EngineLoad(1, 0, 9, num_tokens, 0.5, ended_s=ended_s)


async def booked() -> None:
    """Returns once all callbacks that are due have run."""
    await asyncio.sleep(0)


async def test_a_step_s_tokens_are_appended_before_it_is_recorded() -> None:
    """Recording takes longer than the append, for which a caller waits."""
    async with contextlib.aclosing(Desk()) as desk:
        start(desk.holding, JOB)
        await booked()
        desk.receive([TokenOut(JOB, 1, 0, 0, 97), load(1.0)])
        item, seen = await desk.appended.get()
        assert item.num_tokens == 1
        assert seen.num_running == 0, "the step is not booked yet"
        await booked()
        assert desk.engine.load == load(1.0)


async def test_steps_that_arrive_together_are_recorded_one_by_one() -> None:
    """After a pause of the supervisor, each token gets the time of its own step."""
    async with contextlib.aclosing(Desk()) as desk:
        start(desk.holding, JOB)
        messages: list[FromEngine] = []
        for position in range(3):
            messages += [TokenOut(JOB, 1, 0, position, 97), load(1.0 + 0.25 * position)]
        desk.receive(messages)
        await booked()
        fields = desk.meter.counts.fields
        assert fields["inter_token_latency_seconds:standard:sum"] == 2 * 250_000


async def test_a_free_place_is_offered_once_the_step_is_recorded() -> None:
    """Not earlier: a claim needs to know when the next step ends."""
    async with contextlib.aclosing(Desk()) as desk:
        start(desk.holding, JOB, max_tokens=1)
        desk.receive([TokenOut(JOB, 1, 0, 0, 97, FinishReason.LENGTH), load(1.0)])
        assert not desk.holding.wake.is_set()
        await desk.holding.wake.wait()
        assert desk.engine.load == load(1.0)


@pytest.mark.parametrize(
    ("text", "reason", "told"),
    [
        ('<call>{"name": "now", "arguments": {}}</call>', FinishReason.STOP, "tool_calls"),
        ('<call>{"name": "now", "arguments": {}}</call>', FinishReason.LENGTH, None),
        ('<call>{"name": "now", "arguments": {}}</call>.', None, "tool_calls"),
        ("no call", FinishReason.STOP, None),
        ("no call.", None, "stop"),
    ],
)
async def test_the_engine_is_told_which_answers_call_a_tool(
    text: str, reason: FinishReason | None, told: str | None
) -> None:
    """Whether the engine or the stop string "." ends them."""
    files, sent = hash_tokenizer(), list[ToEngine]()
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    params = {"max_tokens": 99, "seed": 1, "stop": (".",)}
    job = job_of((1, 2, 3), params=params, id=JOB, endpoint=Endpoint.CHAT, tools={"now": ()})
    claimed = Claimed(job, 1, 1, 1, "", 0, 100.0, is_alone=False, cost_tokens=0)
    async with contextlib.aclosing(Desk()) as desk:
        desk.holding.start(HeldJob(claimed, tokenizer, OutputFormats(files, tokenizer)))
        desk.engine.client = SimpleNamespace(send=sent.extend)  # type: ignore[assignment]
        outs = [TokenOut(JOB, 1, 0, i, token_id) for i, token_id in enumerate(encode_text(text))]
        if reason is not None:
            outs.append(TokenOut(JOB, 1, 0, len(outs), EOS_ID, reason))
        desk.receive([*outs, load(1.0)])
        await booked()
    assert sent == ([] if told is None else [StopChoice(JOB, 1, 0, FinishReason(told))])


async def test_a_model_without_a_known_format_of_calls_has_no_tools() -> None:
    """Its card says so, and names the formats that it has."""
    tokenizer = replace(hash_tokenizer(), tool_format=None, reasoning=REASONING_FORMATS[0])
    async with contextlib.aclosing(Desk()) as desk:
        desk.receive([replace(READY, tokenizer=tokenizer)])
        assert desk.engine.ready is not None
        card = make_card("m", desk.engine.ready, ("batch",))
        assert not card.capabilities.tools
        assert (card.tool_call_parser, card.reasoning_parser) == ("", "qwen3")
        desk.receive([replace(READY, tokenizer=hash_tokenizer())])
        card = make_card("m", desk.engine.ready, ("batch",))
        assert card.capabilities.tools
        assert (card.tool_call_parser, card.reasoning_parser) == ("template", "")


# --- when a silent engine hangs ----------------------------------------------------------------

LIMIT_S = 0.01


async def test_silence_with_work_is_a_hang() -> None:
    async with asyncio.timeout(20):
        await Watchdog(LIMIT_S, lambda: True).engine_hangs()


async def test_an_idle_engine_may_be_silent() -> None:
    """A check without work in between restarts the count."""
    looks = 0

    def has_work() -> bool:
        nonlocal looks
        looks += 1
        return looks % 10 != 0 or looks > 30

    async with asyncio.timeout(20):
        await Watchdog(LIMIT_S, has_work).engine_hangs()
    assert looks == 40


async def test_an_engine_that_sends_messages_does_not_hang() -> None:
    """Each message restarts the count."""
    looks = 0

    def has_work() -> bool:
        nonlocal looks
        looks += 1
        if looks <= 30:
            watchdog.reset()
        return True

    watchdog = Watchdog(LIMIT_S, has_work)
    async with asyncio.timeout(20):
        await watchdog.engine_hangs()
    assert looks == 39
