"""A job interrupted at every token resumes with exactly the same output, on the hash model."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from contract.events import LogEntry
from contract.jobs import Job
from tests.fakes import (
    VOCAB_SIZE,
    HashModel,
    HashModelOptions,
    encode_text,
    expected_output,
    hash_tokenizer,
    output_text,
)
from tests.resume.interruptions import Workers
from tests.resume.logged_job import LoggedJob, new_job
from workers.engine.interface import LoadedModel
from workers.ipc.messages import EngineOptions, Request
from workers.supervisor.held_job import HeldJob

PROMPT = encode_text("Interrupt me wherever you like.")
OTHERS = (encode_text("Me too."), PROMPT)
NUM_TOKENS = 32
# Two prompts do not fit into one step, so the choices of a job are at different positions.
OPTIONS = EngineOptions(model_path="hash", max_num_batched_tokens=40)


@dataclass(frozen=True)
class Case:
    """The parameters of a job. Stop strings are taken from each choice's output without stops."""

    params: dict[str, Any] = field(default_factory=dict)
    eos_rate: float = 0.0
    max_model_len: int = 512
    stops_at: tuple[int, int] | None = None  # characters of the text
    never_stops_at: tuple[int, int] | None = None  # and then a character that never follows
    stop_token_at: int | None = None  # position of the output


CASES = {
    "plain": Case(),
    "ends by itself": Case(eos_rate=1 / 16),
    "one token": Case({"max_tokens": 1}),
    "the context is full": Case(max_model_len=len(PROMPT) + 20),
    "min_tokens": Case({"min_tokens": 12}, eos_rate=1 / 4),
    "ignore_eos": Case({"ignore_eos": True}, eos_rate=1 / 8),
    "stop string": Case(stops_at=(10, 14)),
    "stop string that never completes": Case(never_stops_at=(10, 14)),
    "stop string, but not yet": Case({"min_tokens": 20}, stops_at=(3, 6)),
    "stop token": Case(stop_token_at=15),
    "stop string that is shown": Case({"include_stop_str_in_output": True}, stops_at=(10, 14)),
    "stop token that is shown": Case({"include_stop_str_in_output": True}, stop_token_at=15),
    "special tokens that are shown": Case(
        {
            "ignore_eos": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        },
        eos_rate=1 / 4,
    ),
    "logprobs": Case({"logprobs": 2}),
    "prompt_logprobs": Case({"prompt_logprobs": 1, "max_tokens": 12}),
}


def workers_of(case: Case, held_type: type[HeldJob] = HeldJob) -> Workers:
    options = HashModelOptions(
        num_blocks=1024, max_model_len=case.max_model_len, eos_rate=case.eos_rate
    )
    model = HashModel(options)
    loaded = LoadedModel(
        model, model.max_model_len, VOCAB_SIZE, (), hash_tokenizer(), resume="exact"
    )
    return Workers(loaded, OPTIONS, held_type)


def job_of(
    case: Case,
    *,
    temperature: float,
    n: int,
    others: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> Job:
    params |= {"temperature": temperature, "n": n, **case.params}
    fields = {"max_tokens": NUM_TOKENS, **params}
    plain = new_job("plain", PROMPT, *others, **fields)
    outputs = [expected(case, plain, choice) for choice in range(n)]
    if (place := case.stops_at or case.never_stops_at) is not None:
        never = "\0" if case.never_stops_at else ""
        texts = [output_text(output) for output in outputs]
        fields["stop"] = tuple(text[slice(*place)] + never for text in texts)
    if case.stop_token_at is not None:
        fields["stop_token_ids"] = tuple(output[case.stop_token_at] for output in outputs)
    return new_job("job", PROMPT, *others, **fields)


def expected(case: Case, job: Job, choice: int) -> list[int]:
    """The hash model's output of this choice without a stop string: that of its prompt alone."""
    number, choice = divmod(choice, job.params.n)
    model_len, eos_rate = case.max_model_len, case.eos_rate
    return expected_output(
        job.prompts[number],
        job.params.of_prompt(number),
        choice=choice,
        max_model_len=model_len,
        eos_rate=eos_rate,
    )[0]


def assert_same(found: LoggedJob, whole: LoggedJob) -> None:
    """Tokens, text, finish reasons, log probabilities and usage."""
    assert found.has_ended
    assert found.answer == whole.answer
    assert found.num_tokens == whole.num_tokens


def resume_all(workers: Workers, cuts: list[LoggedJob], whole: LoggedJob) -> None:
    """Resumes all jobs at the same time; each must give the whole output."""
    workers.run(*cuts)
    for found in cuts:
        assert_same(found, whole)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.each_pair
def test_a_job_cut_at_every_token_resumes_with_the_same_output(
    case: Case, temperature: float, n: int
) -> None:
    """Once at each position; and at all positions one after another."""
    workers, job = workers_of(case), job_of(case, temperature=temperature, n=n)
    whole = workers.undisturbed(job)
    for choice, token_ids in whole.answer.token_ids.items():
        assert token_ids == expected(case, job, choice)[: len(token_ids)]

    resume_all(workers, whole.cuts(), whole)
    assert_same(workers.passed_on_at_every_event(job), whole)


@pytest.mark.parametrize("varies_seed", [False, True], ids=["one seed", "own seeds"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.each_value
def test_several_prompts_resume_with_the_output_of_each_alone(
    case: Case, varies_seed: bool
) -> None:
    """Two of three prompts are equal: their answers are equal if the caller gave a seed."""
    workers = workers_of(case)
    job = job_of(case, temperature=1.0, n=2, others=OTHERS, varies_seed=varies_seed)
    whole = workers.undisturbed(job)
    assert whole.answer.token_ids.keys() == set(range(6))
    for choice, token_ids in whole.answer.token_ids.items():
        assert token_ids == expected(case, job, choice)[: len(token_ids)]
    if job.params.max_tokens > 1 and not job.params.stop:
        same = [whole.answer.token_ids[0], whole.answer.token_ids[1]]
        assert (same == [whole.answer.token_ids[4], whole.answer.token_ids[5]]) != varies_seed

    resume_all(workers, whole.cuts(), whole)
    assert_same(workers.passed_on_at_every_event(job), whole)


def unsaid(logged: LoggedJob) -> str:
    """Whole characters of the first choice that are decoded but held back."""
    answer = logged.answer
    known = bytes(answer.token_ids.get(0, ())).decode(errors="ignore")
    return known[len(answer.text.get(0, "")) :]


def test_some_cuts_are_inside_held_back_text() -> None:
    """The cases above cut inside a stop string, inside an incomplete one, inside a character, and
    between choices at different positions."""
    completes, never, plain = (
        CASES[name] for name in ("stop string", "stop string that never completes", "plain")
    )
    whole = workers_of(completes).undisturbed(job_of(completes, temperature=0.0, n=1))
    [stop] = whole.job.params.stop
    inside = {unsaid(whole.cut(k)) for k in range(len(whole.log))}
    assert {stop[:1], stop[:2], stop[:3]} <= inside
    whole = workers_of(never).undisturbed(job_of(never, temperature=0.0, n=1))
    assert any(unsaid(whole.cut(k)) for k in range(len(whole.log)))
    assert unsaid(whole) == ""
    whole = workers_of(plain).undisturbed(job_of(plain, temperature=1.0, n=3))
    answers = [whole.cut(k).answer for k in range(1, len(whole.log))]
    assert any(len({*map(len, a.token_ids.values())}) > 1 for a in answers)
    assert any("\ufffd" in output_text(a.token_ids[0]) for a in answers)


class ForgetsAToken(HeldJob):
    """A mistake: starts the engine one token too early."""

    def start_message(self) -> Request:
        start = super().start_message()
        outputs = tuple(output[:-1] for output in start.outputs)
        return msgspec.structs.replace(start, outputs=outputs)


class ForgetsText(HeldJob):
    """A mistake: loses the held-back text of its log."""

    def replay(self, entries: list[LogEntry]) -> None:
        super().replay(entries)
        for choice in self._choices:
            choice.text.flush()


@pytest.mark.parametrize("held_type", [ForgetsAToken, ForgetsText])
def test_a_resume_that_forgets_is_found(held_type: type[HeldJob]) -> None:
    """The tests above can fail: each of these mistakes makes them fail."""
    case = CASES["stop string that never completes"]
    job = job_of(case, temperature=1.0, n=3)
    whole = workers_of(case).undisturbed(job)

    cuts = whole.cuts()
    with pytest.raises(AssertionError):
        resume_all(workers_of(case, held_type), cuts, whole)
