"""Constrained jobs and tool calls interrupted at every token resume with the same output."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from contract.events import ChoiceDelta
from contract.jobs import Endpoint, FinishReason, Job
from contract.output_formats import ReasoningFormat, ToolFormat
from gateway.grammars.compiled import Kind, compile_grammar
from tests.fakes import (
    VOCAB_SIZE,
    HashModel,
    HashModelOptions,
    encode_text,
    hash_grammars,
    hash_tokenizer,
)
from tests.marked_tokenizer import MarkedModel
from tests.resume.interruptions import Workers
from tests.resume.logged_job import LoggedJob, new_job
from workers.engine.interface import LoadedModel
from workers.ipc.messages import EngineOptions

PROMPT = encode_text("user: x\nassistant: ")
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "text": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["red", "green", None]},
    },
    "required": ["id", "text", "kind"],
    "additionalProperties": False,
}


def workers() -> Workers:
    model = HashModel(HashModelOptions(num_blocks=4096, max_model_len=1024))
    loaded = LoadedModel(
        model, model.max_model_len, VOCAB_SIZE, (), hash_tokenizer(), resume="exact"
    )
    return Workers(loaded, EngineOptions(model_path="hash"), grammars=hash_grammars())


def tool_calls(format_: ToolFormat) -> dict[str, Any]:
    return {
        "format": msgspec.structs.asdict(format_),
        "is_bare": format_.is_bare,
        "functions": [
            (0, "add", ITEM, True),
            (1, "now", {"type": "object", "properties": {}}, False),
        ],
        "is_forced": True,
        "may_repeat": False,
    }


def job_of(grammar: str, seed: int, **params: Any) -> Job:
    fields = {"max_tokens": 250, "seed": seed, "temperature": 1.0, "grammar": grammar, **params}
    return new_job(f"job-{seed}", PROMPT, **fields)


def check(job: Job, one: Workers | None = None) -> tuple[LoggedJob, int]:
    """Resumes the job from each of its cuts, all at the same time. Returns the whole job and the
    number of cuts."""
    one = one or workers()
    whole = one.undisturbed(job)
    cuts = whole.cuts()
    one.run(*cuts)
    for cut in cuts:
        assert cut.has_ended
        assert cut.answer == whole.answer
        assert calls_of(cut) == calls_of(whole)
    return whole, len(cuts)


GRAMMARS = {
    "schema": (Kind.JSON_SCHEMA, ITEM),
    "expression": (Kind.REGEX, "([a-f]{3}-){8}[0-9]+x"),
    "choice": (Kind.CHOICE, ["an alternative of some letters", "another of some more letters"]),
}
NUM_CUTS = 1_000


@pytest.mark.campaign
def test_a_thousand_cuts_of_constrained_jobs_change_nothing() -> None:
    """Greedy and sampled, one choice and two."""
    grammars = [compile_grammar(*grammar) for grammar in GRAMMARS.values()]
    num_cuts = seed = 0
    while num_cuts < NUM_CUTS:
        job = job_of(grammars[seed % 3], seed, temperature=seed % 2, n=1 + seed // 6 % 2)
        whole, num = check(job)
        assert set(whole.answer.finish_reason.values()) == {FinishReason.STOP}
        num_cuts += num
        seed += 1
    assert seed >= 12, "every grammar, temperature and number of choices has had its turn"


@pytest.mark.parametrize("seed", range(3))
def test_tool_calls_are_split_alike_after_any_interruption(seed: int) -> None:
    format_ = hash_tokenizer().tool_format
    assert format_ is not None
    job = job_of(compile_grammar(Kind.TOOLS, tool_calls(format_)), seed)
    tools: dict[str, tuple[str, ...]] = {"add": ("text",), "now": ()}
    whole, _ = check(msgspec.structs.replace(job, endpoint=Endpoint.CHAT, tools=tools))

    calls = calls_of(whole)
    assert calls
    assert {name for name, _ in calls} <= {"add", "now"}
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), Mapping)
    assert whole.answer.finish_reason == {0: FinishReason.TOOL_CALLS}
    assert whole.answer.text == {0: ""}


def deltas_of(job: LoggedJob) -> list[ChoiceDelta]:
    return [delta for entry in job.log for delta in getattr(entry.event, "deltas", ())]


def calls_of(job: LoggedJob) -> list[tuple[str, str]]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for delta in deltas_of(job):
        for call in delta.tool_calls:
            names.setdefault(call.index, call.name)
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
    return [(name, arguments[index]) for index, name in names.items()]


THINK = ReasoningFormat(name="qwen3", open="<think>\n", close="\n</think>\n\n")
CALLS = ToolFormat(name="hermes", open="<tool_call>\n", close="\n</tool_call>", between="\n")
THINKER = MarkedModel(reasoning=THINK, tool_format=CALLS)
ANSWER = {"kind": "json_schema", "value": ITEM, "is_strict": True}
BUDGET = 12


def thinking_workers() -> Workers:
    model = HashModel(HashModelOptions(num_blocks=4096, max_model_len=1024))
    loaded = LoadedModel(
        model, model.max_model_len, THINKER.vocab_size, (), THINKER.files, resume="exact"
    )
    options = EngineOptions(model_path="hash")
    return Workers(loaded, options, grammars=THINKER.grammars)


@pytest.mark.parametrize("kind", ["schema", "calls", "text", "either"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.each_value
def test_a_bounded_reasoning_is_bounded_after_any_interruption(kind: str, seed: int) -> None:
    """The tokens before the interruption count, and what follows is constrained as it was."""
    around = THINKER.around("open", BUDGET)
    constraint = {
        "schema": (Kind.JSON_SCHEMA, ITEM),
        "calls": (Kind.TOOLS, tool_calls(CALLS)),
        "text": (Kind.TEXT, None),
        "either": (Kind.TOOLS, {**tool_calls(CALLS), "is_forced": False, "answer": ANSWER}),
    }[kind]
    grammar = compile_grammar(*constraint, around=around)
    job = msgspec.structs.replace(
        job_of(grammar, seed, max_tokens=150),
        prompt_ids=tuple(THINKER.ids("user: x\nassistant: <think>\n")),
        endpoint=Endpoint.CHAT,
        tools={"add": ("text",), "now": ()} if kind in ("calls", "either") else {},
    )
    whole, num_cuts = check(job, thinking_workers())

    [close] = THINKER.ids("</think>")
    assert whole.answer.token_ids[0].index(close) == BUDGET
    assert num_cuts > BUDGET
    reasoned = sum(delta.num_reasoning for delta in deltas_of(whole))
    assert reasoned in (BUDGET, BUDGET + 1)
    is_call = kind == "calls" or (kind == "either" and bool(calls_of(whole)))
    if kind in ("schema", "either") and not is_call:
        assert json.loads(whole.answer.text[0]).keys() == ITEM["properties"].keys()
    if is_call:
        assert [name for name, _ in calls_of(whole)] in (["add"], ["now"])
