"""Places on a host: handed out as on batchway's own engine, and no token changes."""

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import ErrorCode
from contract.jobs import FinishReason, SamplingParams
from tests.fakes import EOS_ID, VOCAB_SIZE, HashHost, expected_prompt_logprobs, hash_grammars
from tests.workers.engine.harness import (
    EOS_RATE,
    GRAMMAR,
    MAX_MODEL_LEN,
    Choice,
    Harness,
    Sizes,
    assert_oracle,
    job,
)
from tests.workers.engine.test_state_machine import LANES, all_lanes
from workers.engine.sequence import RequestRefused, Sequence
from workers.engine.step_plan import StepReport
from workers.ipc.messages import Request, TokenOut
from workers.lanes import DEFAULT_LANES, WARM, Lane, lanes_of
from workers.vllm_engine.placing import HostOutput, PlacingEngine

_STEP_TOKENS = 10_000
_MOST_STEPS = 2_000


@dataclass
class Placed:
    """An engine on a host of the hash model. Collects its output."""

    host: HashHost
    lanes: list[Lane] = field(default_factory=lambda: list(DEFAULT_LANES))
    output_ids: dict[Choice, list[int]] = field(default_factory=dict)
    reasons: dict[Choice, FinishReason] = field(default_factory=dict)
    reports: list[StepReport] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        ends = frozenset({EOS_ID})
        self.engine = PlacingEngine(
            self.host, VOCAB_SIZE, ends, self.lanes, hash_grammars(), lambda: self.now_s
        )

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)
            for choice, known_ids in enumerate(request.outputs):
                self.output_ids[request.job_id, choice] = list(known_ids)

    def step(self) -> StepReport:
        report = self.engine.step()
        self.reports.append(report)
        for out in report.outputs:
            key = (out.job_id, out.choice)
            assert key not in self.reasons, "nothing comes after the end"
            assert out.position == len(self.output_ids[key]), "no gap, no repeat"
            self.output_ids[key].append(out.token_id)
            if out.finish_reason is not None:
                self.reasons[key] = out.finish_reason
        for ended in report.ended:
            assert ended.finish_reason is not None
            self.reasons[ended.job_id, ended.choice] = ended.finish_reason
        return report

    def run(self) -> None:
        """Steps until nothing is left, and asserts that this happens."""
        for _ in range(_MOST_STEPS):
            if self.engine.next_wake_s() is None:
                break
            self.step()
        assert self.engine.next_wake_s() is None, "every sequence ends"
        assert not self.host.requests

    @property
    def num_preemptions(self) -> int:
        return sum(report.num_preemptions for report in self.reports)


def host_of(num_places: int, num_step_tokens: int = _STEP_TOKENS, num_each: int = 1) -> HashHost:
    return HashHost(
        num_places,
        num_step_tokens=num_step_tokens,
        max_model_len=MAX_MODEL_LEN,
        eos_rate=EOS_RATE,
        num_each=num_each,
    )


def keys_of(sequences: list[Sequence]) -> set[Choice]:
    return {(sequence.job_id, sequence.choice) for sequence in sequences}


# What a supervisor does before a step: jobs that come, by lane, tenant, weight, prompt and output
# tokens; a job that is stopped and one that changes its lane, by their numbers.
_jobs = st.tuples(
    st.sampled_from(LANES),
    st.sampled_from(("ada", "bob", "eve")),
    st.sampled_from((1.0, 2.0)),  # exact in sums of shares
    st.integers(1, 12),
    st.integers(1, 20),
)
_turns = st.tuples(
    st.lists(_jobs, max_size=4),
    st.none() | st.integers(0, 30),
    st.none() | st.tuples(st.integers(0, 30), st.sampled_from(LANES)),
)
_scripts = st.lists(_turns, min_size=1, max_size=30)


@settings(max_examples=100, deadline=None)
@given(script=_scripts, num_places=st.integers(1, 6), lanes=all_lanes())
def test_places_are_handed_out_as_on_our_own_engine(
    script: list[tuple[list[tuple[str, str, float, int, int]], int | None, tuple[int, str] | None]],
    num_places: int,
    lanes: list[Lane],
) -> None:
    """In each step the same sequences run and have the same tokens, and the same lanes wait. Our
    own engine has blocks and tokens for all."""
    sizes = Sizes(
        num_blocks=200,
        max_num_batched_tokens=_STEP_TOKENS,
        max_num_seqs=num_places,
        kv_high_water=1.0,
        prefix_caching=False,
    )
    own = Harness(sizes, lanes=lanes)
    placed = Placed(host_of(num_places), lanes)
    num_jobs = 0
    for arriving, stopped, moved in [*script, *[([], None, None)] * _MOST_STEPS]:
        for lane, tenant, weight, num_prompt, max_tokens in arriving:
            request = job(
                f"job-{num_jobs}", range(num_jobs, num_jobs + num_prompt), tenant=tenant, lane=lane
            )
            params = msgspec.structs.replace(request.params, max_tokens=max_tokens)
            request = msgspec.structs.replace(request, weight=weight, params=params)
            own.add(request)
            placed.add(request)
            num_jobs += 1
        for engine in (own.engine, placed.engine):
            if stopped is not None:
                engine.stop_job(f"job-{stopped}", 1)
            if moved is not None:
                engine.reprioritise(f"job-{moved[0]}", 1, moved[1])
        if not own.engine.has_work:
            break
        expected, report = own.step(), placed.step()

        assert keys_of([s for s in own.engine.sequences if s.block_ids]) == keys_of(
            placed.host.requests
        )
        assert sorted(report.outputs, key=_place_of) == sorted(expected.outputs, key=_place_of)
        assert report.waiting_lanes == expected.waiting_lanes
        assert report.num_waiting == expected.num_waiting
        assert report.num_preemptions == expected.num_preemptions
    assert placed.engine.next_wake_s() is None


def _place_of(out: TokenOut) -> tuple[str, int]:
    return out.job_id, out.choice


_params = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 30),
    min_tokens=st.integers(0, 6),
    seed=st.integers(0, 3),
    temperature=st.sampled_from((0.0, 1.0)),
    n=st.integers(1, 3),
    logprobs=st.sampled_from((None, 0, 2)),
    prompt_logprobs=st.sampled_from((None, 1)),
    stop_token_ids=st.sampled_from(((), (10, 32, 97))),
) | st.builds(
    SamplingParams,
    grammar=st.just(GRAMMAR),
    max_tokens=st.integers(1, 30),
    seed=st.integers(0, 3),
    temperature=st.sampled_from((0.0, 1.0)),
    n=st.integers(1, 3),
)


@pytest.mark.campaign
@settings(max_examples=100, deadline=None)
@given(
    arriving=st.lists(
        st.lists(
            st.tuples(st.sampled_from(LANES), st.sampled_from("ab"), st.integers(1, 20), _params),
            max_size=4,
        ),
        max_size=12,
    ),
    num_places=st.integers(1, 4),
    num_step_tokens=st.sampled_from((3, 16, _STEP_TOKENS)),
    num_each=st.sampled_from((1, 3)),
)
def test_whoever_is_displaced_has_the_same_tokens(
    arriving: list[list[tuple[str, str, int, SamplingParams]]],
    num_places: int,
    num_step_tokens: int,
    num_each: int,
) -> None:
    """Free and constrained, with scores, on a host that computes prompts in chunks. The host never
    has more requests than places; a prompt's scores come once."""
    placed = Placed(host_of(num_places, num_step_tokens, num_each))
    requests: list[Request] = []
    for jobs in arriving:
        for lane, tenant, num_prompt, params in jobs:
            number = len(requests)
            request = job(f"job-{number}", range(number, number + num_prompt), n=params.n)
            request = msgspec.structs.replace(request, lane=lane, tenant=tenant, params=params)
            requests.append(request)
            placed.add(request)
        placed.step()
    placed.run()
    assert_oracle(placed, requests)
    scored = Counter(
        scores.job_id for report in placed.reports for scores in report.prompt_logprobs
    )
    assert set(scored.values()) <= {1}
    asking = {
        r.job_id
        for r in requests
        if r.params.prompt_logprobs is not None and r.params.max_tokens and len(r.prompts[0]) > 1
    }
    assert set(scored) == asking


@pytest.mark.parametrize("remembers", [True, False])
def test_tokens_that_the_host_computes_again_are_counted(remembers: bool) -> None:
    """Of a displaced sequence: none if the host has kept their KV."""

    class Remembering(HashHost):
        def step(self) -> list[HostOutput]:
            num_cached = {s: s.num_known - 1 if remembers else 0 for s in self.requests}
            outputs = super().step()
            return [dataclasses.replace(o, num_cached=num_cached[o.sequence]) for o in outputs]

    placed = Placed(Remembering(1, max_model_len=MAX_MODEL_LEN, eos_rate=EOS_RATE))
    placed.add(job("batch", range(5), lane="batch", ignore_eos=True))
    placed.step()
    placed.step()
    placed.add(job("urgent", range(20, 24), lane="interactive", max_tokens=1, ignore_eos=True))
    placed.run()
    num_again = sum(report.num_recomputed_tokens for report in placed.reports)
    assert num_again == (0 if remembers else 6)  # the prompt and one of two tokens of output
    told = [(p.job_id, p.num_tokens) for report in placed.reports for p in report.prefixes]
    assert told == ([("batch", 4), ("urgent", 3)] if remembers else [])  # not when it comes back


def test_an_urgent_job_takes_the_place_of_the_least_computed_batch_job() -> None:
    """The displaced one comes back with its output. Its prompt's scores are not asked for again."""
    placed = Placed(host_of(2))
    params: dict[str, Any] = {"ignore_eos": True, "max_tokens": 12, "prompt_logprobs": 0}
    old = job("old", range(9), lane="batch", **params)
    new = job("new", range(5), lane="batch", **params)
    urgent = job("urgent", range(3), lane="interactive", max_tokens=2, ignore_eos=True)
    placed.add(old, new)
    for _ in range(3):
        placed.step()

    placed.add(urgent)
    report = placed.step()

    assert keys_of(placed.host.requests) == {("old", 0), ("urgent", 0)}
    assert (report.num_preemptions, report.waiting_lanes) == (1, ("batch",))
    assert {out.job_id for out in report.outputs} == {"old", "urgent"}
    placed.run()
    assert [s.job_id for s in placed.host.started] == ["old", "new", "urgent", "new"]
    assert_oracle(placed, [old, new, urgent])
    scored = [s.job_id for each in placed.reports for s in each.prompt_logprobs]
    assert sorted(scored) == ["new", "old"]
    [found] = placed.reports[0].prompt_logprobs[:1]
    expected = [(s.token_id, s.logprob) for s in expected_prompt_logprobs(range(9), 0)]
    assert [(s.token_id, s.logprob) for s in found.logprobs] == expected


def test_whoever_waits_is_stopped_moved_and_ended_by_its_deadline_without_the_host() -> None:
    placed = Placed(host_of(1))
    runs = job("runs", lane="interactive", max_tokens=30, ignore_eos=True)
    placed.add(runs)
    placed.step()
    for name in ("stopped", "moved", "late"):
        request = job(name, lane="batch", max_tokens=1)
        placed.add(msgspec.structs.replace(request, deadline_s=5.0 if name == "late" else None))
    placed.add(job("choices", lane="batch", n=2, max_tokens=1))
    placed.step()

    placed.engine.stop_job("stopped", 1)
    placed.engine.stop_choice("choices", 1, 0, pauses=True)
    placed.engine.reprioritise("moved", 1, "standard")
    assert placed.step().waiting_lanes == ("batch", "standard")
    placed.now_s = 6.0
    assert [(e.job_id, e.code) for e in placed.step().failed] == [("late", "deadline")]
    placed.run()

    assert [keys_of([s]) for s in placed.host.started] == [
        {("runs", 0)},
        {("moved", 0)},
        {("choices", 1)},
    ]


def test_a_refusal_of_the_host_fails_its_job_alone() -> None:
    """It is known when the job gets its place."""

    class Strict(HashHost):
        def start(self, sequence: Sequence, priority: int) -> None:
            if sequence.params.logprobs:
                raise RequestRefused(ErrorCode.BAD_PARAMETER, "no scores here")
            super().start(sequence, priority)

    placed = Placed(Strict(4, max_model_len=MAX_MODEL_LEN, eos_rate=EOS_RATE))
    free = job("free")
    placed.add(job("scored", n=2, logprobs=1), free)
    report = placed.step()
    assert [(e.job_id, e.message) for e in report.failed] == [("scored", "no scores here")]
    placed.run()
    assert_oracle(placed, [free])


class Short(HashHost):
    """Keeps waiting whatever has no token yet."""

    def count(self, report: StepReport) -> None:
        super().count(report)
        report.num_waiting = sum(1 for s in self.requests if s.num_output == 0)


def test_what_the_host_keeps_waiting_counts_as_waiting() -> None:
    """Its lane, as long as it has no token there: the host may lack blocks for it."""
    host = Short(4, num_step_tokens=6, max_model_len=MAX_MODEL_LEN, eos_rate=EOS_RATE)
    placed = Placed(host)
    placed.add(job("first", range(6), lane="batch", ignore_eos=True))
    assert placed.step().waiting_lanes == ()
    placed.add(job("second", range(20), lane="standard"))
    report = placed.step()
    assert (report.num_waiting, report.waiting_lanes) == (1, ("standard",))


def test_what_the_host_keeps_waiting_for_long_is_not_among_what_it_computes() -> None:
    """So other workers are offered it. It is again once it gets its next token."""
    host = Short(4, num_step_tokens=1, max_model_len=1024, eos_rate=0.0)
    placed = Placed(host)
    placed.add(job("first", range(1), lane="standard", max_tokens=300))
    placed.add(job("second", range(3), lane="batch", max_tokens=9))
    announced = []
    while placed.engine.next_wake_s() is not None:
        placed.engine.step(lambda chunks: announced.append({c.sequence.job_id for c in chunks}))
    assert announced == [{"first", "second"}, {"first"}, {"second"}]


def test_vocabulary_and_lengths_are_checked_when_a_job_comes() -> None:
    placed = Placed(host_of(1))
    with pytest.raises(RequestRefused):
        placed.add(job("long", range(MAX_MODEL_LEN)))
    with pytest.raises(RequestRefused):
        placed.add(job("unknown", (VOCAB_SIZE,)))
    assert placed.engine.next_wake_s() is None


def test_a_prompt_for_nobody_is_one_token_at_the_lowest_priority() -> None:
    """vLLM serves the smallest first."""
    priorities: dict[str, int] = {}

    class Host(HashHost):
        def start(self, sequence: Sequence, priority: int) -> None:
            priorities[sequence.lane] = priority
            super().start(sequence, priority)

    engine = PlacingEngine(Host(8), VOCAB_SIZE, frozenset({EOS_ID}), lanes_of(()))
    one = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    lanes = ("interactive", "standard", "batch", WARM.name)
    for lane in lanes:
        engine.add(Request(lane, 0, "t", lane, ((1, 2, 3),), one, ((),), (False,)))
    report = engine.step()
    assert sorted(out.job_id for out in report.outputs) == sorted(lanes)
    assert max(priorities, key=priorities.__getitem__) == WARM.name
    assert not engine.has_work
