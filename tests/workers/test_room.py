"""How many jobs a worker asks for: as many as the next step has places for, and no more."""

import pytest
from tokenizers import Tokenizer

from contract.calls import Claimed
from contract.jobs import Endpoint, FinishReason, Job, SamplingParams
from tests.fakes import VOCAB_SIZE, hash_tokenizer
from workers.held_job import HeldJob
from workers.holding import EngineLink, Holding
from workers.messages import ChoiceEnded, EngineLoad, EngineOptions, Ready, TokenOut

NUM_PLACES = 4
READY = Ready(512, VOCAB_SIZE, (), hash_tokenizer(), 64, 16, NUM_PLACES)


@pytest.fixture
def holding() -> Holding:
    """Of a worker whose engine is ready."""
    options = EngineOptions(model_path="hash", max_num_seqs=NUM_PLACES)
    return Holding(EngineLink(options, ready=READY))


def start(holding: Holding, job_id: str, max_tokens: int = 3, n: int = 1) -> HeldJob:
    job = Job(
        id=job_id,
        tenant="t",
        model="m",
        lane="standard",
        endpoint=Endpoint.COMPLETIONS,
        prompt_ids=(1, 2, 3),
        params=SamplingParams(max_tokens=max_tokens, seed=1, n=n),
        created_s=0,
    )
    claimed = Claimed(job, 1, 1, 1, "", 0, 100.0, is_alone=False, cost_tokens=6)
    held = HeldJob(claimed, Tokenizer.from_str(hash_tokenizer().tokenizer_json))
    holding.start(held)
    return held


def places(holding: Holding) -> int:
    room = holding.room()
    return 0 if room is None else room.max_jobs


def test_a_job_in_its_last_step_leaves_its_place(holding: Holding) -> None:
    """With one token to go it ends in the step that is under way: another may be claimed now, so
    that no step has an empty place."""
    jobs = [start(holding, str(number)) for number in range(NUM_PLACES)]
    assert places(holding) == 0
    jobs[0].take(TokenOut(jobs[0].job.id, 1, 0, 0, 97))
    assert places(holding) == 0
    jobs[0].take(TokenOut(jobs[0].job.id, 1, 0, 1, 97))
    assert places(holding) == 1
    start(holding, "next")
    assert places(holding) == 0
    jobs[0].take(TokenOut(jobs[0].job.id, 1, 0, 2, 97, FinishReason.LENGTH))
    assert places(holding) == 0


def test_a_job_without_output_keeps_its_place(holding: Holding) -> None:
    """Of one token in all nobody knows how many steps its prompt takes."""
    for number in range(NUM_PLACES):
        start(holding, str(number), max_tokens=1)
    assert places(holding) == 0


def test_each_choice_has_a_place(holding: Holding) -> None:
    """Three choices take three; one that has ended takes none, while the others go on."""
    job = start(holding, "three", n=3)
    assert places(holding) == NUM_PLACES - 3
    job.take(TokenOut("three", 1, 1, 0, 97))
    job.take(ChoiceEnded("three", 1, 1, FinishReason.STOP))
    assert places(holding) == NUM_PLACES - 2


def test_nothing_is_claimed_while_a_sequence_waits_in_the_engine(holding: Holding) -> None:
    """Whatever places there are: what was claimed goes first."""
    start(holding, "one")
    holding.engine.load = EngineLoad(1, 1, 0, 0, 0.0)
    assert places(holding) == 0
