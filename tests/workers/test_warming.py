"""A worker without jobs computes what prompts will likely begin with, and stops for any job."""

from typing import Any

import pytest
from msgspec.structs import replace

from contract.errors import BrokerUnavailable, ErrorCode
from contract.jobs import Job
from infra.embedded_redis import EmbeddedRedis
from tests.fakes import HashModelOptions, encode_text, expected_output, output_text
from tests.fleet import Caller, fleet, until
from tests.gateway.conftest import answered, gateway_client, until_listed
from tests.workers.test_room import READY, start
from tests.workers.test_supervisor import assert_exact
from workers.ipc.messages import EngineLoad, EngineOptions, JobFailed, Request, StopJob, TokenOut
from workers.lanes import WARM, lanes_of
from workers.supervisor.holding import EngineLink, Holding
from workers.supervisor.warming import Warming

pytestmark = pytest.mark.anyio

IDS = tuple(range(100))


class Sides:
    """A Redis with prompts to compute, and an engine that remembers what it is sent."""

    def __init__(self, *prompts: tuple[int, ...]) -> None:
        self.prompts = list(prompts)
        self.worth: list[Any] = []
        self.sent: list[Any] = []

    async def warm_take(self, worth: list[str | int]) -> Any:
        self.worth.append(worth)
        return (3.0, ("t", 60, self.prompts.pop(0))) if self.prompts else None

    def send(self, messages: list[Any]) -> None:
        self.sent += messages


def made(sides: Sides) -> tuple[Warming, Holding]:
    engine: Any = EngineLink(EngineOptions(model_path="hash"), client=sides, ready=READY)  # type: ignore[arg-type]
    holding = Holding(engine)
    warming = Warming(sides, holding)  # type: ignore[arg-type]
    holding.has_warm_offer = True
    return warming, holding


async def test_prompts_are_computed_one_after_another() -> None:
    """As one output token each, in a lane of their own; what they computed is told once."""
    sides = Sides(IDS, IDS[::-1])
    warming, holding = made(sides)
    for expected in (IDS, IDS[::-1]):
        await warming.begin()
        await warming.begin()  # one at a time
        request = sides.sent.pop()
        assert isinstance(request, Request)
        assert (request.prompts, request.lane, request.tenant) == ((expected,), WARM.name, "t")
        assert (request.params.max_tokens, request.deadline_s) == (1, 3.0)
        holding.wake.clear()
        warming.end(TokenOut(request.job_id, 0, 0, 0, 7))
        assert holding.wake.is_set(), "for the next one"
    await warming.begin()
    await warming.begin()  # nothing is offered any more
    assert sides.worth == [[], ["t", 40, 0], ["t", 40, 0]]
    assert not sides.sent


async def test_a_worker_with_a_job_takes_nothing() -> None:
    """Nor one without an engine, nor one that nothing was offered."""
    sides = Sides(IDS)
    warming, holding = made(sides)
    held = start(holding, "job")
    await warming.begin()
    holding.drop(held)
    holding.engine.ready, ready = None, holding.engine.ready
    await warming.begin()
    holding.engine.ready, holding.has_warm_offer = ready, False
    await warming.begin()
    assert sides.worth == []


async def test_the_job_that_comes_goes_first() -> None:
    """What was begun is stopped, not resumed, and not told of."""
    sides = Sides(IDS)
    warming, holding = made(sides)
    await warming.begin()
    warm_id = warming.job_id
    warming.give_way(start(holding, "job").job)
    assert sides.sent[1:] == [StopJob(warm_id, 0)]
    assert warming.job_id == ""
    holding.clear()
    await warming.begin()
    assert sides.worth == [[], []]


async def test_what_later_prompts_begin_with_is_counted_once() -> None:
    """Of the tenant's own prompts, where all that was computed is in the prompt."""
    sides = Sides(IDS)
    warming, holding = made(sides)
    await warming.begin()
    warming.end(TokenOut(warming.job_id, 0, 0, 0, 7))
    job = start(holding, "job").job
    for prompt_ids, tenant in ((IDS, "u"), (IDS[:99], "t"), ((*IDS, 9), "t"), ((*IDS, 8), "t")):
        warming.give_way(replace(job, prompt_ids=prompt_ids, tenant=tenant))
    holding.clear()
    await warming.begin()
    assert sides.worth[1:] == [["t", 40, 0, "t", 0, 40]]


async def test_a_failure_ends_it_and_nothing_else() -> None:
    """Of the engine or of Redis; a new engine has no cache."""
    sides = Sides(IDS, IDS)
    warming, holding = made(sides)
    await warming.begin()
    warming.end(JobFailed(warming.job_id, 0, ErrorCode.DEADLINE, ""))
    await warming.begin()
    warming.end(TokenOut(warming.job_id, 0, 0, 0, 7))
    holding.engine.ready, ready = None, holding.engine.ready
    await warming.begin()
    holding.engine.ready = ready
    warming.give_way(start(holding, "job", tenant="t").job)
    assert sides.worth == [[], []]

    async def away(worth: list[str | int]) -> Any:
        raise BrokerUnavailable("away")

    holding.clear()
    sides.warm_take = away  # type: ignore[method-assign]
    await warming.begin()
    assert warming.job_id == ""


@pytest.mark.parametrize(("running", "num"), [({"warm-1"}, 0), ({"job-1"}, 5), (set(), 5)])
def test_steps_for_nobody_are_not_counted(running: set[str], num: int) -> None:
    """Speed and metrics know steps of jobs alone."""
    warming, holding = made(Sides())
    holding.engine.running = frozenset(running)
    load = EngineLoad(num_running=num or 1, num_step_tokens=num or 9)
    warming.hide_step(load)
    assert (load.num_running, load.num_step_tokens) == (num, num)


def test_its_lane_is_the_last() -> None:
    """Below those of any configuration."""
    lanes = lanes_of(EngineOptions(model_path="x").lanes)
    assert max(lanes, key=lambda lane: lane.priority) is WARM


# --- with real workers


MODEL = HashModelOptions(max_model_len=2048, num_blocks=512)
HISTORY = "a long conversation that goes on and on. " * 6


async def leave(caller: Caller, job: Job, text: str) -> Job:
    """Leaves a prompt after a job to the worker of that; returns it as a job."""
    ids = encode_text(text)
    num_known = len(job.prompt_ids)
    assert ids[:num_known] == job.prompt_ids
    await caller.functions.warm(replace(job, prompt_ids=ids), num_known, lives_s=60.0)
    return replace(job, prompt_ids=ids)


async def is_told(caller: Caller) -> None:
    """Returns once the worker hears what is left to it; what is lost is not warmed."""
    await caller.num_workers(1)
    found: Any = await caller.client.zrange(caller.keys.of("workers", "m"), -1, -1)

    async def listens() -> bool:
        channel = caller.keys.of("ctl", found[0].decode())
        return bool((await caller.client.pubsub_numsub(channel))[0][1])

    await until(listens)


async def worth(caller: Caller, tenant: str = "t") -> Any:
    return await caller.client.hgetall(caller.keys.of("warmth", "m", tenant))


async def num_computed(caller: Caller, job: Job) -> int:
    """Tokens of the prompt of an ended job that its worker computed."""
    [run] = (await caller.view(job)).runs
    return sum(mark.num_tokens for mark in run.marks)


async def test_the_next_turn_finds_what_was_warmed(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """Its tokens are the same; the counts of jobs, and of their tokens, know nothing of it."""
    async with fleet(redis_server.url, 1, MODEL):
        await is_told(caller)
        first = await caller.submit(HISTORY)
        assert_exact(first, await caller.answer(first), MODEL)
        text = HISTORY + "what the template makes of the answer " * 8
        warmed = await leave(caller, first, text)
        num_tokens = len(warmed.prompt_ids) - len(first.prompt_ids)

        async def is_computed() -> bool:
            return bool((await worth(caller)).get(b"tokens") == b"%d" % num_tokens)

        await until(is_computed)
        second = await caller.submit(text + "and then?")
        assert_exact(second, await caller.answer(second), MODEL)
        assert await num_computed(caller, second) <= len("and then?") + 16
        await leave(caller, second, text + "and then? more")

        async def is_used() -> bool:
            return bool((await worth(caller)).get(b"used") == b"%d" % num_tokens)

        await until(is_used)
        totals: Any = await caller.client.hgetall(caller.keys.of("totals", "m"))
    assert totals[b"warmed_tokens_used_total"] == b"%d" % num_tokens
    assert totals[b"prompt_tokens_total:standard"] == b"%d" % (
        len(first.prompt_ids) + len(second.prompt_ids)
    )


SLOW = HashModelOptions(max_model_len=2048, num_blocks=512, step_s=0.05)


async def test_what_is_computed_for_nobody_gives_way_and_dies_alone(
    caller: Caller, redis_server: EmbeddedRedis
) -> None:
    """A job that comes meanwhile has the tokens of a quiet worker. With the worker only that is
    lost: another one runs the next turn."""
    async with fleet(redis_server.url, 1, SLOW) as [worker]:
        await is_told(caller)
        first = await caller.submit(HISTORY, max_tokens=2)
        await caller.answer(first)

        async def is_taken() -> bool:
            return not [key async for key in caller.client.scan_iter(caller.keys.of("warm", "*"))]

        await leave(caller, first, HISTORY + "x" * 1500)
        await until(is_taken)
        other = await caller.submit("a job of somebody else", max_tokens=2)
        assert_exact(other, await caller.answer(other), SLOW)
        assert await worth(caller) == {}, "it had not ended"
        await leave(caller, first, HISTORY + "y" * 1500)
        await until(is_taken)
        worker.kill()
    async with fleet(redis_server.url, 1, SLOW):
        second = await caller.submit(HISTORY + "y" * 1500, max_tokens=2)
        assert_exact(second, await caller.answer(second), SLOW)
        assert await worth(caller) == {}


OTHERWISE = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
    "{{ message.content | upper }}{% else %}{{ message.content }}{% endif %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TALKS = HashModelOptions(max_model_len=4096, num_blocks=512, eos_rate=1 / 200)


@pytest.mark.parametrize("warms", [False, True])
async def test_the_next_turn_of_a_chat_computes_less(
    caller: Caller, redis_server: EmbeddedRedis, warms: bool
) -> None:
    """Where the template writes answers otherwise, the cache ends before the answer; with warming
    it has it. The second answer is the same."""
    async with (
        fleet(redis_server.url, 1, TALKS),
        gateway_client(redis_server.url, warms_next_turn=warms) as http,
    ):
        await is_told(caller)
        await until_listed(http, {"m"})
        messages = [{"role": "user", "content": HISTORY + "2"}]
        body: dict[str, Any] = {"model": "m", "temperature": 0, "chat_template": OTHERWISE}
        first = await answered(
            http, "/v1/chat/completions", body | {"max_tokens": 2000}, messages=messages
        )
        [choice] = first["choices"]
        assert choice["finish_reason"] == "stop"
        num_said = len(choice["message"]["content"].encode())
        assert num_said > 100

        async def is_warm() -> bool:
            return bool(await worth(caller, "default"))

        if warms:
            await until(is_warm)
        messages += [choice["message"], {"role": "user", "content": "and then?"}]
        answer = await http.post(
            "/v1/chat/completions", json=body | {"messages": messages, "max_tokens": 8}
        )
        found = await caller.functions.read(answer.headers["x-job-id"], "default")
    assert found is not None
    [run] = found[0].runs
    num_computed = sum(mark.num_tokens for mark in run.marks)
    assert (num_computed < num_said) is warms
    said, _ = expected_output(
        found[0].job.prompt_ids, found[0].job.params, max_model_len=4096, eos_rate=1 / 200
    )
    assert answer.json()["choices"][0]["message"]["content"] == output_text(said)
