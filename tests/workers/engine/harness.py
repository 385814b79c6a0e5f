"""An engine on the hash model that collects its output, for the tests in this folder."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from contract.jobs import FinishReason, SamplingParams
from gateway.grammars.compiled import Kind, compile_grammar
from tests.fakes import VOCAB_SIZE, HashModel, HashModelOptions, expected_output, hash_grammars
from workers.engine.admission_check import RecentLengths
from workers.engine.engine import Engine
from workers.engine.interface import Chunk, EngineLimits
from workers.engine.sequence import Sequence
from workers.engine.step_plan import StepReport
from workers.engine.strategy import ContinuousBatching, Strategies, Strategy
from workers.ipc.messages import Request
from workers.lanes import DEFAULT_LANES, Lane

MAX_MODEL_LEN = 40
GRAMMAR = compile_grammar(
    Kind.JSON_SCHEMA,
    {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 999},
            "c": {"enum": ["ab", "cd"]},
        },
        "required": ["n", "c"],
        "additionalProperties": False,
    },
)
EOS_RATE = 1 / 8
Choice = tuple[str, int]  # job id and index
Prompts = tuple[tuple[int, ...], ...]


class CallersCap(RecentLengths):
    """Predicts that each output reaches its maximum."""

    def predict(self, sequence: Sequence) -> int:
        return sequence.max_output

    def observe(self, sequence: Sequence) -> None:
        pass


@dataclass(frozen=True)
class Sizes:
    """Limits that change when a sequence runs, but never its output."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_batched_tokens: int = 32
    max_num_seqs: int = 8
    kv_high_water: float = 0.8
    prefill_share: float | None = None
    max_preemptions: int = 3
    prefix_caching: bool = True
    speculates: bool = False
    num_kept_states: int | None = None  # beside those of running sequences; None: no states

    @property
    def num_state_slots(self) -> int:
        return 0 if self.num_kept_states is None else self.max_num_seqs + self.num_kept_states

    @property
    def num_kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def limits(self) -> EngineLimits:
        return EngineLimits(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            vocab_size=VOCAB_SIZE,
            kv_high_water=self.kv_high_water,
            prefill_share=self.prefill_share,
            max_preemptions=self.max_preemptions,
            prefix_caching=self.prefix_caching,
            speculates=self.speculates,
        )


@dataclass
class Harness:
    """Steps an engine, collects its output, and audits it after each step."""

    sizes: Sizes
    strategy: Strategy = field(default_factory=ContinuousBatching)
    model_options: HashModelOptions = field(default_factory=HashModelOptions)
    lanes: Seq[Lane] = DEFAULT_LANES
    lengths: RecentLengths | None = None
    output_ids: dict[Choice, list[int]] = field(default_factory=dict)
    reasons: dict[Choice, FinishReason] = field(default_factory=dict)
    num_preemptions: int = 0
    num_accepted: int = 0  # drafted tokens
    num_rejected: int = 0
    token_s: float = 0.0  # what the model takes for a token, on the engine's clock
    step_s: float = 0.0  # what it takes for a step, beside its tokens
    watch: Callable[[Seq[Chunk]], None] | None = None  # sees each step before it is computed

    def __post_init__(self) -> None:
        self.model = HashModel(
            HashModelOptions(
                num_blocks=self.sizes.num_blocks,
                block_size=self.sizes.block_size,
                max_model_len=MAX_MODEL_LEN,
                eos_rate=EOS_RATE,
                bad_row_id=self.model_options.bad_row_id,
                crash_id=self.model_options.crash_id,
                num_state_slots=self.sizes.num_state_slots,
            )
        )
        self.now_s = 0.0
        self.engine = Engine(
            self.model,
            self.sizes.limits,
            self.strategy,
            clock_s=self.clock_s,
            lanes=self.lanes,
            lengths=self.lengths,
            grammars=hash_grammars(),
        )

    def add(self, request: Request) -> None:
        """Adds a job. Its known outputs count as collected. Raises RequestRefused."""
        self.engine.add(request)
        for choice, known_ids in enumerate(request.outputs):
            self.output_ids[request.job_id, choice] = list(known_ids)
            self.reasons.pop((request.job_id, choice), None)

    def clock_s(self) -> float:
        model = self.model
        return self.now_s + model.num_steps * self.step_s + model.num_tokens * self.token_s

    def reconfigure(self, sizes: Sizes, strategies: Strategies, lanes: Seq[Lane]) -> None:
        self.sizes, self.lanes = sizes, lanes
        self.engine.reconfigure(sizes.limits, strategies, lanes)

    def step(self) -> StepReport:
        report = self.engine.step(self.watch)
        self.engine.audit()
        self.model.poison(self.engine.blank_block_ids)
        num_tokens = report.num_step_tokens + report.num_padding_tokens
        assert num_tokens <= self.sizes.max_num_batched_tokens
        assert report.num_running <= self.sizes.max_num_seqs
        self.num_preemptions += report.num_preemptions
        self.num_accepted += report.num_accepted_tokens
        self.num_rejected += report.num_drafted_tokens - report.num_accepted_tokens
        for output in report.outputs:
            key = (output.job_id, output.choice)
            assert key not in self.reasons, "nothing comes after the end"
            assert output.position == len(self.output_ids[key]), "no gap, no repeat"
            self.output_ids[key].append(output.token_id)
            if output.finish_reason is not None:
                self.reasons[key] = output.finish_reason
        for sequence in report.ended:
            assert sequence.finish_reason is not None
            self.reasons[sequence.job_id, sequence.choice] = sequence.finish_reason
        return report

    def sleep(self) -> None:
        """Advances the clock to the time when the next step has work."""
        wake_s = self.engine.next_wake_s()
        assert wake_s is not None, "work that nothing will ever wake"
        self.now_s += max(0.0, wake_s - self.clock_s())

    def run(self, max_num_steps: int = 4_000) -> None:
        """Steps until nothing is left. Asserts that this happens and that no block is lost."""
        for _ in range(max_num_steps):
            if not self.engine.has_work:
                break
            self.sleep()
            self.step()
        assert not self.engine.has_work, "every sequence ends"
        assert self.engine.step().num_free_blocks == self.sizes.num_blocks


def job(
    job_id: str = "job",
    prompt_ids: Seq[int] = (1, 2, 3),
    *,
    more_prompts: Seq[Seq[int]] = (),
    tenant: str = "t",
    lane: str = "lane",
    **changes: object,
) -> Request:
    """A new job of epoch 1; `changes` are sampling parameters."""
    values: dict[str, object] = {"max_tokens": 8, "seed": 7, **changes}
    params = SamplingParams(**values)  # type: ignore[arg-type]
    prompts = (tuple(prompt_ids), *map(tuple, more_prompts))
    num = params.n * len(prompts)
    return Request(job_id, 1, tenant, lane, prompts, params, ((),) * num, (False,) * num)


def oracle(request: Request) -> dict[Choice, tuple[list[int], FinishReason]]:
    """The complete output of each choice of a job: what its prompt yields alone."""
    num_each = request.params.n
    return {
        (request.job_id, number * num_each + choice): expected_output(
            prompt_ids,
            request.params.of_prompt(number),
            choice=choice,
            max_model_len=MAX_MODEL_LEN,
            eos_rate=EOS_RATE,
        )
        for number, prompt_ids in enumerate(request.prompts)
        for choice in range(num_each)
    }


def assert_oracle(served: Any, requests: Iterable[Request]) -> None:
    """A Harness, or whatever else collects output, has that of each job alone."""
    for request in requests:
        for key, (token_ids, reason) in oracle(request).items():
            assert served.output_ids[key] == token_ids
            assert served.reasons[key] == reason


def jobs_of(report: StepReport) -> set[str]:
    """Those that have got a token in a step."""
    return {output.job_id for output in report.outputs}


def all_sizes() -> st.SearchStrategy[Sizes]:
    """From one block and one token per step up to ample."""
    return st.builds(
        Sizes,
        num_blocks=st.integers(1, 24),
        block_size=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 40),
        max_num_seqs=st.integers(1, 6),
        kv_high_water=st.sampled_from((0.1, 0.5, 0.8, 1.0)),
        prefill_share=st.sampled_from((None, 0.2)),
        max_preemptions=st.sampled_from((0, 3)),
        prefix_caching=st.booleans(),
        speculates=st.booleans(),
        num_kept_states=st.sampled_from((None, None, 0, 1, 8)),
    )


def all_params() -> st.SearchStrategy[SamplingParams]:
    free = st.builds(
        SamplingParams,
        max_tokens=st.integers(0, 20),
        min_tokens=st.integers(0, 6),
        seed=st.integers(0, 3),
        temperature=st.sampled_from((0.0, 1.0)),
        n=st.integers(1, 3),
        varies_seed=st.booleans(),
        top_k=st.sampled_from((0, 2)),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from(((), (10, 32, 97), tuple(range(97, 123)))),
    )
    constrained = st.builds(
        SamplingParams,
        grammar=st.just(GRAMMAR),
        max_tokens=st.integers(0, 36),
        seed=st.integers(0, 3),
        temperature=st.sampled_from((0.0, 1.0)),
        n=st.integers(1, 3),
        varies_seed=st.booleans(),
        stop_token_ids=st.sampled_from(((), (32,))),
    )
    return free | constrained


def all_prompts() -> st.SearchStrategy[Prompts]:
    """Prompts of a job: one or a few, some too long for the context, many with equal beginnings."""
    prompt = st.integers(1, MAX_MODEL_LEN + 4).flatmap(
        lambda num: st.sampled_from((97, 98)).map(lambda token_id: (token_id,) * num)
    )
    return st.tuples(prompt) | st.lists(prompt, min_size=2, max_size=3).map(tuple)
