"""Compilations and masks that take long, or never end, hold up nobody but their own rows."""

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from threading import Event

import msgspec
import numpy as np
import pytest
from llguidance import LLMatcher

from tests.fakes import EOS_ID, VOCAB_SIZE, InlineExecutor, hash_tokenizer
from tests.workers.engine.harness import GRAMMAR, Harness, Sizes, assert_oracle, job
from tests.workers.engine.test_turns import WAIT_S, OnDemand
from workers.engine import constraints
from workers.engine.constraints import Constraints
from workers.engine.grammar import Grammars, Matcher

SIZES = Sizes(num_blocks=256, max_num_batched_tokens=128)
LETTERS = LLMatcher.grammar_from_regex("[ab]{40}")
DIGITS = LLMatcher.grammar_from_regex("[0-9]+")
FREE = job("free", max_tokens=30, ignore_eos=True)


class BlockedGrammars(Grammars):
    """With threads as in production. What tenants named `slow…` compile or mask waits."""

    def __init__(self, *, compiles: bool = False, masks: bool = False) -> None:
        super().__init__(hash_tokenizer().tokenizer_json, VOCAB_SIZE, {EOS_ID})
        self.compiles, self.masks = compiles, masks  # which of both waits
        self.released = Event()
        self.compiling = Event()  # a slow one has begun
        self.begun: list[str] = []  # tenants whose compilations have begun

    def matcher(self, grammar: str, output_ids: Seq[int] = (), tenant: str = "") -> Matcher:
        self.begun.append(tenant)
        if self.compiles and tenant.startswith("slow"):
            self.compiling.set()
            self.released.wait(WAIT_S)
        return super().matcher(grammar, output_ids, tenant)

    def forbidden(self, matchers: Seq[Matcher], drafts: Seq[Seq[int]] = ()) -> np.ndarray:
        if self.masks and matchers[0].tenant.startswith("slow"):
            self.released.wait(WAIT_S)
        return super().forbidden(matchers, drafts)


@pytest.fixture
def compiling() -> Iterator[BlockedGrammars]:
    grammars = BlockedGrammars(compiles=True)
    yield grammars
    grammars.released.set()


@pytest.fixture
def masking() -> Iterator[BlockedGrammars]:
    grammars = BlockedGrammars(masks=True)
    yield grammars
    grammars.released.set()


def harness_with(grammars: Grammars, sizes: Sizes = SIZES) -> Harness:
    harness = Harness(sizes)
    max_model_len = harness.model.max_model_len
    harness.engine._constraints = Constraints(grammars, max_model_len, skips_late=True)
    return harness


def step_until(harness: Harness, *job_ids: str) -> None:
    """Steps until the first choice of each of these jobs has ended."""
    while any((job_id, 0) not in harness.reasons for job_id in job_ids):
        harness.step()


def wait_for_mask(harness: Harness, job_id: str) -> None:
    [matcher] = [s.matcher for s in harness.engine.sequences if s.job_id == job_id]
    assert matcher is not None
    assert matcher.mask is not None
    matcher.mask.found.result(WAIT_S)


def test_masks_are_made_while_all_compilations_are_blocked(compiling: BlockedGrammars) -> None:
    """Of a job whose grammar was compiled before, and of a job that comes later with the same."""
    harness = harness_with(compiling)
    compiling.start_matchers(GRAMMAR, [()], "quick").result(WAIT_S)
    for number in range(8):
        grammar = LLMatcher.grammar_from_regex(f"x{{1,{number + 9}}}")
        harness.add(job(f"slow-{number}", tenant=f"slow-{number}", grammar=grammar))
    request = job("quick", tenant="quick", grammar=GRAMMAR, max_tokens=36)
    harness.add(request)

    step_until(harness, "quick")

    assert_oracle(harness, [request])


def test_plain_rows_go_on_beside_blocked_compilations(compiling: BlockedGrammars) -> None:
    """In as many steps as alone."""
    alone, beside = Harness(SIZES), harness_with(compiling)
    alone.add(FREE)
    for number in range(8):
        beside.add(job(f"slow-{number}", tenant=f"slow-{number}", grammar=GRAMMAR))
    beside.add(FREE)

    step_until(alone, "free")
    step_until(beside, "free")

    assert_oracle(beside, [FREE])
    assert beside.model.num_steps == alone.model.num_steps


def test_a_tenant_with_many_grammars_leaves_a_thread_to_others(compiling: BlockedGrammars) -> None:
    harness = harness_with(compiling)
    for number in range(8):
        harness.add(job(f"slow-{number}", tenant="slow", grammar=GRAMMAR))
    request = job("quick", tenant="quick", grammar=DIGITS, max_tokens=36)
    harness.add(request)

    step_until(harness, "quick")

    assert_oracle(harness, [request])
    assert compiling.begun == ["slow", "quick"]


@pytest.mark.parametrize("stop", ["job", "choice", "deadline"])
def test_a_compilation_ends_with_its_job(compiling: BlockedGrammars, stop: str) -> None:
    """One that waits never begins; the result of one that has begun is dropped."""
    harness = harness_with(compiling)
    for job_id in ("begun", "waits"):
        request = job(job_id, tenant="slow", grammar=GRAMMAR)
        passed = -1.0 if stop == "deadline" else None
        harness.add(msgspec.structs.replace(request, deadline_s=passed))
    compiling.compiling.wait(WAIT_S)

    for job_id in ("begun", "waits"):
        if stop == "job":
            harness.engine.stop_job(job_id, 1)
        elif stop == "choice":
            harness.engine.stop_choice(job_id, 1, 0)
    harness.step()
    compiling.released.set()

    # A tenant's calls run one after the other.
    compiling.start_matchers(DIGITS, [()], "slow").result(WAIT_S)
    assert compiling.begun == ["slow", "slow"]
    assert not harness.engine.has_work
    assert harness.output_ids["begun", 0] == harness.output_ids["waits", 0] == []


def test_a_row_whose_mask_is_late_skips_steps(masking: BlockedGrammars) -> None:
    """Plain rows and those of another grammar's tenant end meanwhile; then it goes on with the
    tokens that it would have had."""
    harness = harness_with(masking)
    late = job("late", tenant="slow", grammar=GRAMMAR, max_tokens=36)
    other = job("other", tenant="other", grammar=DIGITS, max_tokens=36, seed=5)
    for request in (late, other, FREE):
        harness.add(request)

    step_until(harness, "other", "free")
    while not harness.engine._scheduler.num_held:  # its grammar may be compiled last
        harness.step()
    num_forced = len(harness.output_ids["late", 0])
    assert harness.step().num_step_tokens == 0  # what is left waits
    assert harness.engine.next_wake_s() != harness.clock_s()
    masking.released.set()
    wait_for_mask(harness, "late")
    harness.run()

    assert_oracle(harness, (late, other, FREE))
    assert num_forced < len(harness.output_ids["late", 0])


def test_a_row_that_waits_for_its_mask_can_be_preempted_and_stopped(
    masking: BlockedGrammars,
) -> None:
    """It keeps its mask, but no place in a step."""
    harness = harness_with(masking)
    late = job("late", tenant="slow", grammar=DIGITS, max_tokens=36, seed=5)
    for request in (late, job("stopped", tenant="slow", grammar=DIGITS), FREE):
        harness.add(request)
    while harness.engine._scheduler.num_held < 2:
        harness.step()

    harness.engine.preempt("late")
    harness.engine.stop_job("stopped", 1)
    step_until(harness, "free")
    masking.released.set()
    wait_for_mask(harness, "late")
    harness.run()

    assert_oracle(harness, [late])
    assert harness.output_ids["stopped", 0] == []


@pytest.mark.parametrize("seed", range(30))
def test_when_masks_come_changes_no_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside drafts, preemptions for memory, and log probabilities of prompts."""
    monkeypatch.setattr(constraints, "_PATIENCE_S", 0.0)
    draw, masker = random.Random(seed), OnDemand()
    tokenizer_json = hash_tokenizer().tokenizer_json
    grammars = Grammars(tokenizer_json, VOCAB_SIZE, {EOS_ID}, InlineExecutor(), masker)
    num_blocks, block_size = draw.choice(((40, 1), (10, 4), (40, 4)))
    sizes = Sizes(num_blocks, block_size, speculates=seed % 2 == 0)
    harness = harness_with(grammars, sizes)
    harness.token_s, harness.step_s = 0.001, 0.02  # so drafts pay, as a first job shows
    harness.add(job("first", max_tokens=20, ignore_eos=True))
    harness.run()
    requests = [
        job(
            f"job-{number}",
            tuple(draw.choices((97, 98), k=draw.randint(1, 12))),
            tenant=draw.choice("ab"),
            grammar=draw.choice((GRAMMAR, DIGITS, LETTERS, "")),
            max_tokens=draw.randint(1, 20),
            seed=number,
            n=draw.choice((1, 2)),
            prompt_logprobs=draw.choice((None, 1)),
        )
        for number in range(5)
    ]
    for request in requests:
        harness.add(request)

    for _ in range(4_000):
        if not harness.engine.has_work:
            break
        harness.sleep()
        harness.step()
        for _ in range(min(len(masker.calls), draw.randint(0, 2))):
            masker.calls.pop(draw.randrange(len(masker.calls)))()

    assert_oracle(harness, requests)
