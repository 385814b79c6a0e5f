"""Steps started on the device before the engine asks for them yield the same tokens.

Over 300 lines: one runner, with all that may disturb its steps.
"""

import dataclasses
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from contract.jobs import SamplingParams
from tests.marks import LONG
from tests.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.workers.model.driver import (
    allot_blocks,
    make_prompts,
    make_sequence,
    run_step,
    run_to_end,
)
from workers.engine.engine import Engine
from workers.engine.grammar import Mask
from workers.engine.interface import Chunk, EngineLimits, Model, RowFailed, Sample
from workers.engine.masks import StepMasks
from workers.engine.strategy import ContinuousBatching
from workers.ipc.messages import EngineOptions, Request
from workers.model.ahead import runner as ahead_runner
from workers.model.ahead.runner import AheadRunner, PrepareRows
from workers.model.attention.interface import PreparedAttention
from workers.model.attention.reference import PreparedRows, RowsStep
from workers.model.gpu.graphs import (
    Compute,
    Record,
    StepGraphs,
    padded_size,
    sizes_up_to,
)
from workers.model.gpu.request_state import HostCopy
from workers.model.loader import load_model
from workers.model.runner import ModelRunner

MAX_SEQS = 6
Outputs = dict[tuple[str, int], list[tuple[int, float | None]]]  # tokens, log probabilities
# Parameters of jobs: those that change no logits, and others.
WISHES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 1.2, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1, "top_k": 12},
    {"temperature": 1.0, "n": 3},
]
ODD_WISHES: list[dict[str, Any]] = [
    *WISHES,
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.0, "presence_penalty": 0.6, "frequency_penalty": 0.9, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 1.0, "min_tokens": 4},
    {"temperature": 0.0, "logit_bias": {7: 3.0}},
]


class _Replayed:
    """Stands in for a CUDA graph: repeats the recorded computation."""

    def __init__(self, compute: Compute) -> None:
        self.replay = compute


FAMILIES = ["llama", "qwen3", "gemma2", "gpt2"]
KINDS = {"common": WISHES, "odd": ODD_WISHES}
DISTURBANCES = {"calm": 0.0, "disturbed": 0.3}


@pytest.fixture(
    scope="module", params=[FAMILIES[0], *(pytest.param(f, marks=LONG) for f in FAMILIES[1:])]
)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = save_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    options = EngineOptions(model_path=str(folder), device="cpu", max_num_seqs=16, fused=False)
    loaded = load_model(options, lambda text: None)
    assert isinstance(loaded.model, ModelRunner)
    return loaded.model


def ahead(
    runner: ModelRunner, record: Record | None = None, prepare: PrepareRows = PreparedRows
) -> AheadRunner:
    return AheadRunner(runner, prepare, MAX_SEQS, torch.device("cpu"), record)


def recorded_ahead(runner: ModelRunner, record: Record = _Replayed) -> AheadRunner:
    """With the graphs that a load would record. Torch's attention cannot be recorded, but in place
    of a graph its computation is repeated, with contexts of at most this runner's."""

    def prepare(step: RowsStep) -> PreparedRows:
        return PreparedRows(dataclasses.replace(step, longest=step.longest or 128))

    model = ahead(runner, record, prepare)
    assert model.decoder.graphs is not None
    with torch.inference_mode():
        model.decoder.graphs.record_all()
    return model


def run_jobs(
    model: Model,
    wishes: list[dict[str, Any]],
    *,
    seed: int,
    disturb: float,
    num_jobs: int = 10,
    max_num_seqs: int = MAX_SEQS,
) -> Outputs:
    """Jobs that arrive at random steps, with a small budget. With `disturb`, some are preempted
    and some stopped, drawn by step, so that both runners meet the same."""
    limits = EngineLimits(24, max_num_seqs, VOCAB_SIZE, grows_ahead=isinstance(model, AheadRunner))
    engine = Engine(model, limits, ContinuousBatching())
    generator = random.Random(seed)
    prompts = make_prompts([generator.randint(3, 40) for _ in range(num_jobs)], VOCAB_SIZE, seed)
    coming = [(generator.randint(0, 25), number) for number in range(num_jobs)]
    found: Outputs = {}
    stopped: set[str] = set()
    for step in range(400):
        for _, number in [entry for entry in coming if entry[0] == step]:
            engine.add(_request(number, prompts[number], wishes[number % len(wishes)]))
        victim = str(generator.randrange(num_jobs))
        if generator.random() < disturb:
            engine.preempt(victim)
        if generator.random() < disturb / 8:
            engine.stop_job(victim, 1)
            stopped.add(victim)
        report = engine.step()
        engine.audit()
        for output in report.outputs:
            key = output.job_id, output.choice
            scored = output.logprob
            found.setdefault(key, []).append((output.token_id, scored.logprob if scored else None))
        if step > 25 and not engine.has_work:
            break
    assert not engine.has_work
    return {key: tokens for key, tokens in found.items() if key[0] not in stopped}


def assert_same(found: Outputs, expected: Outputs) -> None:
    """The same tokens; log probabilities are equal except for rounding."""
    for key in found | expected:
        ids, logprobs = zip(*found[key], strict=True)
        expected_ids, expected_logprobs = zip(*expected[key], strict=True)
        assert ids == expected_ids
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


def _request(number: int, prompt: list[int], wishes: dict[str, Any]) -> Request:
    params = SamplingParams(**{"max_tokens": 5 + 7 * (number % 3), "seed": number} | wishes)
    outputs, finished = ((),) * params.n, (False,) * params.n
    return Request(str(number), 1, "t", "lane", (tuple(prompt),), params, outputs, finished)


@pytest.mark.parametrize("disturb", DISTURBANCES.values(), ids=DISTURBANCES)
@pytest.mark.parametrize("wishes", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("runner", FAMILIES, indirect=True)
@pytest.mark.each_value
def test_steps_ahead_give_the_tokens_of_steps_in_turn(
    runner: ModelRunner, wishes: list[dict[str, Any]], disturb: float
) -> None:
    """For all parameters of jobs, with preemptions, stops and new arrivals; computed each time,
    or recorded once."""
    for seed, model in enumerate((ahead(runner), recorded_ahead(runner))):
        expected = run_jobs(runner, wishes, seed=seed, disturb=disturb, num_jobs=12)
        found = run_jobs(model, wishes, seed=seed, disturb=disturb, num_jobs=12)
        assert_same(found, expected)


def test_most_rows_are_ready_when_they_are_asked_for(runner: ModelRunner) -> None:
    """Otherwise the device would wait for the host. Streams whose prompt has just been computed are
    computed beside the prompts that follow it."""
    model = ahead(runner)
    wishes = [{"temperature": 0.0, "ignore_eos": True, "max_tokens": 30}]

    found = run_jobs(model, wishes, seed=0, disturb=0.0)

    num_streamed = sum(len(tokens) - 1 for tokens in found.values())  # all but prompts' own
    assert 0.5 * num_streamed < model.num_rows_used == model.num_rows_started <= num_streamed


def _note_forwards(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each forward from now on."""
    sizes: list[int] = []
    plain = runner.forward

    def noted(input_ids: torch.Tensor, *others: Any) -> torch.Tensor:
        sizes.append(input_ids.shape[1])
        return plain(input_ids, *others)

    monkeypatch.setattr(runner, "forward", noted)
    return sizes


def test_prompts_and_streams_share_a_forward(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the weights are read once. The streams stay a step ahead."""
    model = ahead(runner)
    sequences = [make_sequence(prompt) for prompt in make_prompts([9, 6, 20], VOCAB_SIZE)]
    allot_blocks(sequences, model)
    for _ in range(2):
        run_step(model, sequences[:2], chunk_tokens=99)
    sizes = _note_forwards(runner, monkeypatch)

    for _ in range(3):
        run_step(model, sequences, chunk_tokens=8)

    assert sizes == [8 + 2, 8 + 2, 4 + 2]
    assert model.num_rows_used == 6


def test_the_middle_of_a_prompt_is_not_waited_for(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a stream, only the stream's tokens of the pass before are read; alone, the pass before
    is waited for, so that one is in flight at most."""
    events: list[str] = []

    class Noted(HostCopy):
        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor)
            self._name = f"{len(tensor)} of pass {len(sizes)}"

        def read(self) -> list[int]:
            events.append(self._name)
            return super().read()

    model = ahead(runner)
    sequences = [make_sequence(prompt) for prompt in make_prompts([9, 60], VOCAB_SIZE)]
    allot_blocks(sequences, model)
    for _ in range(2):
        run_step(model, sequences[:1], chunk_tokens=99)
    sizes = _note_forwards(runner, monkeypatch)
    monkeypatch.setattr(ahead_runner, "HostCopy", Noted)

    run_step(model, sequences[:1], chunk_tokens=8)
    for _ in range(2):
        run_step(model, sequences, chunk_tokens=8)
    for _ in range(3):
        run_step(model, sequences[1:], chunk_tokens=8)

    assert sizes == [1, 9, 9, 8, 8, 8]
    assert events == [f"1 of pass {n}" for n in (1, 2, 3)] + ["0 of pass 4", "0 of pass 5"]


def _count_replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of each replay from now on."""
    sizes: list[int] = []
    plain = StepGraphs.replay

    def noted(self: StepGraphs, size: int) -> None:
        sizes.append(size)
        plain(self, size)

    monkeypatch.setattr(StepGraphs, "replay", noted)
    return sizes


def test_changed_rows_and_log_probabilities_leave_steps_ahead(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream with log probabilities, one with a penalty and one that no end token may end yet are
    started like others, in the same replay."""
    replays = _count_replays(monkeypatch)
    model = recorded_ahead(runner)
    prompts = make_prompts([9, 6, 7, 5], VOCAB_SIZE)
    wishes: list[dict[str, Any]] = [
        {}, {"logprobs": 2}, {"repetition_penalty": 1.3, "logit_bias": {7: 1.0}}, {"min_tokens": 9},
    ]  # fmt: skip
    sequences = [make_sequence(p, **w) for p, w in zip(prompts, wishes, strict=True)]
    allot_blocks(sequences, model)
    run_step(model, sequences, chunk_tokens=99)
    run_step(model, sequences, chunk_tokens=99)
    sizes = _note_forwards(runner, monkeypatch)
    replays.clear()

    samples = [run_step(model, sequences, chunk_tokens=99) for _ in range(3)]

    assert len(sizes) == len(replays) == 3
    assert model.num_rows_used == 4 * 3
    assert all(len(step[1].top_logprobs) == 2 for step in samples)


def test_a_constrained_row_is_drawn_within_its_mask(runner: ModelRunner) -> None:
    """With a penalty too."""
    found = []
    for model in (runner, ahead(runner)):
        sequences = [
            make_sequence(prompt, repetition_penalty=1.5, temperature=1.0)
            for prompt in make_prompts([9, 6, 7], VOCAB_SIZE)
        ]
        allot_blocks(sequences, model)
        constrained = sequences[1]
        run_step(model, sequences, chunk_tokens=99)
        for number in range(4):
            allowed = [20 + number, 40, 60]
            forbidden = np.ones((1, VOCAB_SIZE), dtype=bool)
            forbidden[0, allowed] = False
            mask: Future[np.ndarray] = Future()
            mask.set_result(forbidden)
            chunks = [Chunk(s, s.num_computed, 1, samples=True) for s in sequences]
            rows = model.run(chunks, masks=StepMasks({constrained: Mask(mask, 0)}))
            for sequence, row in zip(sequences, rows, strict=True):
                assert isinstance(row, Sample)
                sequence.token_ids.append(row.token_id)
                sequence.num_computed += 1
            assert constrained.token_ids[-1] in allowed
        found.append([sequence.token_ids for sequence in sequences])
    assert found[0] == found[1]


def test_prompts_share_a_graph_with_streams(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of prompts too, and a prompt whose sample has log probabilities."""
    replays = _count_replays(monkeypatch)
    prompts = make_prompts([9, 20, 30, 7], VOCAB_SIZE)
    wishes: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {}, {"logprobs": 2}]
    tokens, num_direct = [], []
    for model in (runner, recorded_ahead(runner)):
        sequences = [make_sequence(p, **w) for p, w in zip(prompts, wishes, strict=True)]
        allot_blocks(sequences, model)
        run_step(model, sequences[:1], chunk_tokens=99)
        sizes = _note_forwards(runner, monkeypatch)
        replays.clear()
        for _ in range(5):
            run_step(model, sequences, chunk_tokens=8)
        tokens.append([sequence.token_ids for sequence in sequences])
        num_direct.append(len(sizes) - len(replays))
    assert tokens[0] == tokens[1]
    assert num_direct == [5, 0]


def test_a_prompt_behind_a_long_context_has_no_graph(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its tokens would read the context for itself. Nor has a step of too many tokens."""
    monkeypatch.setattr(ahead_runner, "SPLIT_TOKENS", 16)
    monkeypatch.setattr(ahead_runner, "_MOST_PROMPT_PARTS", 9)
    has_graph_for = recorded_ahead(runner).decoder.has_graph_for
    near, far, huge = (make_sequence(p) for p in make_prompts([9, 39, 520], VOCAB_SIZE))

    assert has_graph_for([Chunk(near, 0, 9, samples=True)])  # a part for each token
    assert has_graph_for([Chunk(far, 31, 2, samples=False)])  # three parts for each
    assert not has_graph_for([Chunk(far, 31, 8, samples=True)])

    for name in ("_MOST_PROMPT_PARTS", "_MOST_MORE_PARTS"):
        monkeypatch.setattr(ahead_runner, name, 99_999)
    assert has_graph_for([Chunk(huge, 0, 512, samples=False)])
    assert not has_graph_for([Chunk(huge, 0, 513, samples=False)])

    # Nor where the streams beside it leave no room for its parts.
    monkeypatch.setattr(ahead_runner, "_MOST_MORE_PARTS", 2)
    prompt = Chunk(near, 0, 3, samples=True)
    assert has_graph_for([prompt, Chunk(far, 31, 1, samples=True)])
    assert not has_graph_for([prompt, Chunk(far, 31, 1, samples=True), Chunk(huge, 47, 1, True)])


def test_a_row_that_moved_to_another_block_is_computed_again(runner: ModelRunner) -> None:
    """After a preemption whose whole prompt was found in the cache, the last token has no KV
    yet."""
    found = []
    for model in (ahead(runner), runner):
        [prompt] = make_prompts([runner.block_size], VOCAB_SIZE)
        sequence = make_sequence(prompt, max_tokens=6)
        sequence.block_ids = [3, 5]
        run_step(model, [sequence], chunk_tokens=99)
        sequence.block_ids, sequence.num_preemptions = [3, 8], 1
        for layer in runner.cache.layers.values():
            layer.keys[8], layer.values[8] = 7.0, 7.0
        while sequence.num_output < 6:
            run_step(model, [sequence], chunk_tokens=99)
        found.append(sequence.token_ids)

    assert found[0] == found[1]


def test_graphs_are_recorded_largest_first_and_then_used(runner: ModelRunner) -> None:
    """Each size once; then replays compute the steps."""
    recorded: list[Callable[[], None]] = []

    def record(compute: Compute) -> _Replayed:
        recorded.append(compute)
        return _Replayed(compute)

    model = recorded_ahead(runner, record)
    graphs = model.decoder.graphs
    assert graphs is not None

    assert graphs.sizes == [512, 448, 384, 320, 256, 192, 128, 64, 8, 4, 2, 1]
    run_jobs(model, WISHES, seed=0, disturb=0.0)
    assert len(recorded) == 12


def test_a_step_that_reads_more_than_a_graph_has_room_for_is_computed_directly(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One part of a context more than there is room for."""
    monkeypatch.setattr(ahead_runner, "SPLIT_TOKENS", 16)
    monkeypatch.setattr(ahead_runner, "_MOST_MORE_PARTS", 2)
    model = recorded_ahead(runner)
    longest: list[int | None] = []  # None: by a graph
    prepare = model.decoder._prepare_rows

    def noted(step: RowsStep) -> PreparedAttention:
        longest.append(step.longest)
        return prepare(step)

    monkeypatch.setattr(model.decoder, "_prepare_rows", noted)
    with torch.inference_mode():
        model.decoder.logits([31, 31], 2)  # four parts: one of each row, and two
        model.decoder.logits([47, 31], 2)

    assert longest == [None, 48]


def test_a_row_that_is_not_finite_fails_alone(runner: ModelRunner) -> None:
    """The device leaves it open, and the host computes it again and fails it."""
    prompts = make_prompts([5, 9], VOCAB_SIZE)
    sequences = [make_sequence(prompt, max_tokens=6) for prompt in prompts]
    model = ahead(runner)
    allot_blocks(sequences, model)
    for _ in range(2):  # the prompts, and a step that starts the next one
        run_step(model, sequences, chunk_tokens=99)
    spoiled = sequences[0].block_ids[0]
    for layer in runner.cache.layers.values():
        layer.values[spoiled] = float("nan")

    run_step(model, sequences, chunk_tokens=99)  # in flight before
    rows = model.run([Chunk(s, s.num_computed, 1, True) for s in sequences])

    for layer in runner.cache.layers.values():
        layer.values[spoiled] = 0.0
    expected = [make_sequence(prompts[1], max_tokens=6)]
    run_to_end(runner, expected, chunk_tokens=99)
    assert isinstance(rows[0], RowFailed)
    assert isinstance(rows[1], Sample)
    output = [*sequences[1].token_ids, rows[1].token_id]
    assert output == expected[0].token_ids[: len(output)]


def test_more_sequences_than_rows_are_served(runner: ModelRunner) -> None:
    """An operator may raise the number while the worker runs."""
    arguments: dict[str, Any] = {"seed": 1, "disturb": 0.1, "num_jobs": 16, "max_num_seqs": 9}

    assert run_jobs(ahead(runner), WISHES, **arguments) == run_jobs(runner, WISHES, **arguments)


@pytest.mark.campaign
@pytest.mark.parametrize("split_tokens", [16, 512])
def test_the_triton_kernel_reads_tables_on_the_device(
    split_tokens: int, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contexts in one part, and in more parts than the longest one has."""
    triton_attention = pytest.importorskip("workers.model.attention.triton_attention")
    for module in (triton_attention, ahead_runner):
        monkeypatch.setattr(module, "SPLIT_TOKENS", split_tokens)
    backend = triton_attention.TritonAttention(runner.block_size)
    arguments: dict[str, Any] = {"seed": 2, "disturb": 0.0, "num_jobs": 2}

    found = run_jobs(ahead(runner, prepare=backend.prepare_rows), WISHES, **arguments)

    assert found == run_jobs(runner, WISHES, **arguments)


def test_padded_sizes_are_few_and_large_enough() -> None:
    """Of streams, none is over twice the number of rows, except the smallest; steps with prompts
    have further ones, 64 apart."""
    assert [padded_size(n) for n in (1, 3, 8, 9, 255, 257, 289)] == [1, 4, 8, 16, 256, 288, 320]
    assert sizes_up_to(20) == [1, 2, 4, 8, 16, 24, 64, 128, 192, 256, 320, 384, 448, 512]
    assert sizes_up_to(300)[-6:] == [256, 288, 320, 384, 448, 512]
    assert sizes_up_to(600)[-2:] == [576, 608]


def test_the_loader_builds_the_ahead_runner(tmp_path: Path) -> None:
    """If it is asked to; by itself only on a fast GPU."""
    folder = save_tiny_model("llama", tmp_path)
    options = EngineOptions(model_path=str(folder), device="cpu", max_num_seqs=4, ahead=True)

    assert isinstance(load_model(options, lambda text: None).model, AheadRunner)
